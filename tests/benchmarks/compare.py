"""The same work as the side-by-side benchmark of Python queues, done by venturi: one JSON line with the same fields.

    python -m tests.benchmarks compare --dsn postgresql://... --jobs 20000 --concurrency 100

In a fresh database of its own: N no-op jobs in chunks of 1000, 300 more one by one, a drain by one worker process, and
the pick-up latency of an idle worker over single committed enqueues.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time

import psycopg
from psycopg import conninfo

import venturi

CHUNK = 1000
SINGLE = 300


@venturi.task("noop")
class Noop:
    """Does nothing."""

    i: int = 0


class Drain:
    """Counts the runs of one queue's no-op handler, and says when there were enough."""

    def __init__(self, queue: venturi.Queue) -> None:
        self.started: list[float] = []
        self._wanted = 0
        self._enough = threading.Event()
        queue.handler(task=Noop)(self._run)

    def _run(self, task: Noop) -> None:
        self.started.append(time.perf_counter())
        if len(self.started) >= self._wanted:
            self._enough.set()

    def wait_for(self, count: int) -> None:
        """Wait until so many runs have started in all."""
        self._wanted = count
        if len(self.started) < count:
            self._enough.wait()
        self._enough.clear()


def fresh(admin: str, name: str) -> str:
    """An empty database of that name; its connection string."""
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)'.encode())
        connection.execute(f'CREATE DATABASE "{name}"'.encode())
    return conninfo.make_conninfo(admin, dbname=name)


def measure(dsn: str, jobs: int, concurrency: int, latency: int) -> dict[str, object]:
    """The figures of one round."""
    queue: venturi.Queue = venturi.Queue(dsn=dsn)
    queue.migrate()
    drain = Drain(queue)
    result: dict[str, object] = {}
    begun = time.perf_counter()
    for first in range(0, jobs, CHUNK):
        queue.enqueue_many([Noop(i) for i in range(first, first + CHUNK)])
    result["enqueue_bulk_per_s"] = round(jobs / (time.perf_counter() - begun))
    begun = time.perf_counter()
    for i in range(SINGLE):
        queue.enqueue(Noop(i))
    result["enqueue_single_per_s"] = round(SINGLE / (time.perf_counter() - begun))
    begun = time.perf_counter()
    with queue.work(block=False, concurrency=concurrency):
        drain.wait_for(jobs + SINGLE)
        result["drain_per_s"] = round((jobs + SINGLE) / (drain.started[-1] - begun))
        result["ran"] = len(drain.started)
        time.sleep(1.5)
        result["latency"] = _latency(queue, drain, latency)
    queue.close()
    return result


def _latency(queue: venturi.Queue, drain: Drain, tries: int) -> dict[str, float]:
    """Pick-up times as another process would have them: the enqueues do not wake this process's worker directly."""
    times: list[float] = []
    with psycopg.connect(queue.store.dsn, autocommit=True) as connection:
        for i in range(tries):
            before = len(drain.started)
            begun = time.perf_counter()
            queue.enqueue(Noop(i), conn=connection)
            drain.wait_for(before + 1)
            times.append(drain.started[-1] - begun)
            time.sleep(0.005)
    times.sort()
    last = times[min(len(times) - 1, int(0.99 * len(times)))]
    return {"p50_ms": round(1e3 * statistics.median(times), 2), "p99_ms": round(1e3 * last, 2)}


def main(arguments: list[str]) -> None:
    """Run one round and print it."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks compare")
    parser.add_argument("--dsn", required=True, help="of a role that may create databases")
    parser.add_argument("--jobs", type=int, default=20000)
    parser.add_argument("--concurrency", type=int, default=100)
    parser.add_argument("--latency", type=int, default=200)
    options = parser.parse_args(arguments)
    dsn = fresh(options.dsn, "bench_venturi")
    figures = measure(dsn, options.jobs, options.concurrency, options.latency)
    print(json.dumps({"peer": "venturi", **figures}), flush=True)
