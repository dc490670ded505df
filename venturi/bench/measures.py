"""What is measured: rates in jobs a second, and times from the enqueue to the start of the handler.

``insert`` and ``round_trip`` do without a queue what the others do with one: they tell what this server and the way to
it allow at best.
"""

from __future__ import annotations

import random
import statistics
import time
import typing as t
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from venturi import codec
from venturi.bench.crew import crew
from venturi.bench.options import Options
from venturi.bench.scratch import Scratch
from venturi.bench.tasks import PAYLOADS, chunks
from venturi.store.connections import Session, run

__all__ = ["MEASURES", "Bench", "Figures", "Measure", "percentiles", "rate"]

Figures: t.TypeAlias = dict[str, float]

TICK = 0.005
"""Seconds between two arrivals of jobs in ``steady``."""

STEADY_SECONDS = 10
"""The longest that ``steady`` goes on."""

SETTLE_SECONDS = 1.5
"""Until a worker that finds nothing to do has parked."""


def rate(count: int, seconds: float) -> Figures:
    """So many jobs in that time."""
    return {"per_s": round(count / seconds)}


def percentiles(times: Iterable[float]) -> Figures:
    """The median and the 99th percentile of times in seconds, in milliseconds."""
    ordered = sorted(times)
    last = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"p50_ms": round(1e3 * statistics.median(ordered), 2), "p99_ms": round(1e3 * last, 2)}


class Bench:
    """The measures; each finds the queue empty."""

    def __init__(self, scratch: Scratch, options: Options) -> None:
        self._scratch = scratch
        self._queue = scratch.queue
        self._options = options
        self._class, self._make = PAYLOADS[options.payload]
        self._drained: Figures | None = None

    def insert(self) -> Figures:
        """Bare rows of the same payload, each committed."""
        return self._one_by_one(self._insert)

    def round_trip(self) -> Figures:
        """A bare row committed with a NOTIFY, heard on another connection, and claimed by one UPDATE."""
        with self._scratch.another() as listener:
            run(listener, f'LISTEN "{self._queue.schema}"'.encode())
            return percentiles([self._round_trip(i, listener) for i in range(self._options.tries)])

    def enqueue(self) -> Figures:
        """One by one, each committed."""
        self._queue.enqueue(self._make(0))  # opens the connection
        return self._one_by_one(lambda i: self._queue.enqueue(self._make(i)))

    def transaction(self) -> Figures:
        """A bare row and an enqueue in one transaction of the caller's."""

        def both(i: int) -> None:
            with self._scratch.connection.transaction():
                self._insert(i)
                self._queue.enqueue(self._make(i), conn=self._scratch.connection)

        return self._one_by_one(both)

    def producers(self) -> Figures:
        """One by one, each committed, by many threads with connections of their own."""
        threads = self._options.producers
        each = max(1, self._options.singles // threads)

        def produce(connection: Session) -> None:
            for i in range(each):
                self._queue.enqueue(self._make(i), conn=connection)

        with ExitStack() as stack:
            connections = [stack.enter_context(self._scratch.another()) for _ in range(threads)]
            pool = stack.enter_context(ThreadPoolExecutor(threads))
            began = time.monotonic()
            list(pool.map(produce, connections))
            return rate(threads * each, time.monotonic() - began)

    def enqueue_many(self) -> Figures:
        """In chunks of a thousand, each committed."""
        began = time.monotonic()
        for tasks in chunks(self._make, self._options.jobs):
            self._queue.enqueue_many(tasks)
        return rate(self._options.jobs, time.monotonic() - began)

    def drain(self) -> Figures:
        """From the start of the worker processes to the start of the last job's handler."""
        self.enqueue_many()
        with crew(self._queue, self._options) as workers:
            self._drained = rate(self._options.jobs, workers.wait_for(self._options.jobs) - workers.started)
        return self._drained

    def pickup(self) -> Figures:
        """From an enqueue by another process to the start of the handler, by idle workers that are notified."""

        def wake(i: int) -> float:
            _rest()
            sent = time.monotonic()
            self._queue.enqueue(self._make(i))
            return sent

        with crew(self._queue, self._options) as workers:
            time.sleep(SETTLE_SECONDS)
            sent = [wake(i) for i in range(self._options.tries)]
            workers.wait_for(len(sent))
            return percentiles(_delays(sent, workers.stop()))

    def steady(self) -> Figures:
        """From the commit to the start of the handler, while jobs arrive at a rate that nothing holds up."""
        wanted = self._options.rate or self._half()
        jobs = max(1, min(self._options.jobs, wanted * STEADY_SECONDS))
        with crew(self._queue, self._options) as workers:
            time.sleep(SETTLE_SECONDS)
            began = time.monotonic()
            committed = self._arrive(jobs, wanted)
            arrived = rate(jobs, time.monotonic() - began)
            workers.wait_for(jobs)
            return {**arrived, **percentiles(_delays(committed, workers.stop()))}

    def _half(self) -> int:
        drained = self._drained or self.drain()
        self._scratch.empty()
        return max(1, int(drained["per_s"] / 2))

    def _arrive(self, jobs: int, wanted: int) -> list[float]:
        """Enqueue at every tick what is due by then; when each was committed."""
        began = time.monotonic()
        committed: list[float] = []
        while len(committed) < jobs:
            time.sleep(TICK)
            due = min(jobs, int((time.monotonic() - began) * wanted))
            tasks = [self._make(i) for i in range(len(committed), due)]
            self._queue.enqueue_many(tasks)
            committed += [time.monotonic()] * len(tasks)
        return committed

    def _one_by_one(self, step: Callable[[int], object]) -> Figures:
        began = time.monotonic()
        for i in range(self._options.singles):
            step(i)
        return rate(self._options.singles, time.monotonic() - began)

    def _round_trip(self, i: int, listener: Session) -> float:
        _rest()
        began = time.monotonic()
        self._scratch.run(
            "WITH made AS (INSERT INTO {q}.bare (id, payload) VALUES (%s, %s)) SELECT pg_notify(%s, '')",
            i, self._payload(i), self._queue.schema,
        )  # fmt: skip
        list(listener.notifies(timeout=10, stop_after=1))
        self._scratch.run(
            "UPDATE {q}.bare SET taken = true WHERE id = %s AND NOT taken RETURNING payload", i
        ).fetchall()
        return time.monotonic() - began

    def _insert(self, i: int) -> None:
        self._scratch.run("INSERT INTO {q}.bare (id, payload) VALUES (%s, %s)", i, self._payload(i))

    def _payload(self, i: int) -> str:
        return codec.encode(self._make(i), self._class)


def _rest() -> None:
    """Long enough for a worker to park, and to stay so for a while; a machine that rests is slower to begin, too."""
    time.sleep(random.uniform(0.3, 0.4))


def _delays(sent: Sequence[float], began: dict[int, float]) -> list[float]:
    # A worker may begin before the producer has learned of its own commit.
    return [max(0.0, began[i] - moment) for i, moment in enumerate(sent)]


class Measure(t.NamedTuple):
    """A measure, and with which other one it is compared by which figure; None: with none."""

    take: Callable[[Bench], Figures]
    against: str | None = None
    by: str = "per_s"


MEASURES: dict[str, Measure] = {
    "insert": Measure(Bench.insert),
    "round_trip": Measure(Bench.round_trip),
    "enqueue": Measure(Bench.enqueue, "insert"),
    "transaction": Measure(Bench.transaction, "insert"),
    "producers": Measure(Bench.producers, "insert"),
    "enqueue_many": Measure(Bench.enqueue_many, "insert"),
    "drain": Measure(Bench.drain),
    "pickup": Measure(Bench.pickup, "round_trip", "p50_ms"),
    "steady": Measure(Bench.steady, "round_trip", "p50_ms"),
}
