"""The same work as the side-by-side benchmark of Python queues, done by venturi: one JSON line with the same fields.

    python -m tests.benchmarks compare --dsn postgresql://... --jobs 20000 --concurrency 100

In a fresh database of its own: N no-op jobs in chunks of 1000, 300 more one by one, a drain by one worker process, and
the pick-up latency of an idle worker over single committed enqueues.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import psycopg

import venturi
from venturi.bench.measures import percentiles
from venturi.bench.settings import describe
from venturi.bench.tasks import CHUNK, Noop, chunks

from .ground import fresh

__all__ = ["main", "whole_chunks"]

SINGLES = 300


class Runs:
    """When each run of the queue's no-op handler began."""

    def __init__(self, queue: venturi.Queue) -> None:
        self.began: list[float] = []
        queue.handler(task=Noop)(self._run)

    def _run(self, task: Noop) -> None:
        self.began.append(time.perf_counter())

    def wait_for(self, count: int, interval: float) -> float:
        """Look at each interval, in seconds, whether so many runs have begun; when the last of them did."""
        while len(self.began) < count:
            time.sleep(interval)
        return self.began[-1]


def measure(dsn: str, jobs: int, concurrency: int, latency: int) -> dict[str, object]:
    """The figures of one round."""
    queue: venturi.Queue = venturi.Queue(dsn=dsn)
    queue.migrate()
    runs = Runs(queue)
    result: dict[str, object] = {}
    start = time.perf_counter()
    for tasks in chunks(Noop, jobs):
        queue.enqueue_many(tasks)
    result["enqueue_bulk_per_s"] = round(jobs / (time.perf_counter() - start))
    start = time.perf_counter()
    for i in range(SINGLES):
        queue.enqueue(Noop(i))
    result["enqueue_single_per_s"] = round(SINGLES / (time.perf_counter() - start))
    start = time.perf_counter()
    with queue.work(block=False, concurrency=concurrency):
        last = runs.wait_for(jobs + SINGLES, 0.01)
        result["drain_per_s"] = round((jobs + SINGLES) / (last - start))
        result["ran"] = len(runs.began)
        time.sleep(1.5)
        result["latency"] = percentiles(_latencies(queue, runs, latency))
    queue.close()
    return result


def _latencies(queue: venturi.Queue, runs: Runs, tries: int) -> list[float]:
    """Pick-up times as another process would have them: the enqueues do not wake this process's worker directly."""
    times: list[float] = []
    with psycopg.connect(queue.store.dsn, autocommit=True) as connection:
        for i in range(tries):
            before = len(runs.began)
            start = time.perf_counter()
            queue.enqueue(Noop(i), conn=connection)
            times.append(runs.wait_for(before + 1, 0.0002) - start)
            time.sleep(0.005)
    return times


def whole_chunks(text: str) -> int:
    """A number of jobs; the benchmark counts what it asked for, and enqueues whole chunks."""
    if not text.isdecimal() or int(text) < 1 or int(text) % CHUNK:
        raise argparse.ArgumentTypeError(f"{text!r} is no multiple of {CHUNK}")
    return int(text)


def main(arguments: list[str]) -> None:
    """Run one round and print it."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks compare")
    parser.add_argument("--dsn", required=True, help="of a role that may create databases")
    parser.add_argument("--jobs", type=whole_chunks, default=20000)
    parser.add_argument("--concurrency", type=int, default=100)
    parser.add_argument("--latency", type=int, default=200)
    parser.add_argument("--database", default="bench_venturi", help="made anew (default: bench_venturi)")
    options = parser.parse_args(arguments)
    with psycopg.connect(options.dsn, autocommit=True) as connection:
        print(json.dumps(describe(connection)), file=sys.stderr)
    dsn = fresh(options.dsn, options.database)
    figures = measure(dsn, options.jobs, options.concurrency, options.latency)
    print(json.dumps({"peer": "venturi", **figures}), flush=True)
