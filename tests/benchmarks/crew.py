"""Worker processes of the benchmarks of growth, and what a drain by them costs."""

from __future__ import annotations

import collections.abc as cabc
import contextlib
import multiprocessing
import multiprocessing.synchronize
import typing as t
from multiprocessing.process import BaseProcess

import attrs

import venturi

from .ground import ANY, CLAIM, RECOVERY, SETTLE, Cost, Rows, Site

__all__ = ["CAPPED", "KINDS", "STEPS", "Drained", "Duty", "crew", "drain", "rate", "reach", "working"]

CAPPED = "growth.capped"

_SPAWN = multiprocessing.get_context("spawn")


def _kind(number: int) -> type[t.Any]:
    @venturi.task(f"growth.step{number}")
    class Step:
        i: int = 0

    return Step


STEPS = [_kind(number) for number in range(30)]
KINDS = [f"growth.step{number}" for number in range(30)]
"""What the workers have handlers for, in the order of `STEPS`."""


@venturi.task(CAPPED)
class Capped:
    """Holds the only run of its kind for as long as the worker lives."""

    i: int = 0


@attrs.frozen
class Duty:
    """What each process of a crew does.

    Attributes:
        kinds: For how many of `KINDS` it has handlers.
        first: The first of them.
        capped: Whether it has one of `CAPPED` too.
        poll: Seconds.
    """

    concurrency: int = 20
    kinds: int = 1
    first: int = 0
    capped: bool = False
    poll: float = 30.0


def nothing(task: object) -> None:
    """A handler."""


def hold(task: Capped, ctx: venturi.Context) -> None:
    """A handler that ends with its worker."""
    ctx.cancelled.wait()


def labour(dsn: str, duty: Duty, gate: multiprocessing.synchronize.Barrier) -> None:
    """What a process runs, until it is told to stop."""
    queue: venturi.Queue = venturi.Queue(dsn=dsn)
    for step in STEPS[duty.first : duty.first + duty.kinds]:
        queue.handler(task=step)(nothing)
    if duty.capped:
        queue.handler(cap=1)(hold)
    gate.wait(120)
    queue.work(concurrency=duty.concurrency, poll=duty.poll)


@contextlib.contextmanager
def crew(site: Site, *duties: Duty) -> cabc.Generator[list[BaseProcess]]:
    """A worker process for each duty, all begun together. They and their sessions are gone afterwards."""
    gate = _SPAWN.Barrier(len(duties) + 1)
    processes = [_SPAWN.Process(target=labour, args=(site.dsn, duty, gate)) for duty in duties]
    for process in processes:
        process.start()
    try:
        gate.wait(120)
        yield list(processes)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(60)
        site.until(lambda: site.sessions() == 0, "the workers' sessions are gone", 60)


def working(crew: cabc.Iterable[BaseProcess]) -> None:
    """Fail when a worker has ended, since nothing that is measured then counts."""
    for process in crew:
        if process.exitcode is not None:
            raise SystemExit(f"a worker ended with {process.exitcode}")


def reach(site: Site, crew: cabc.Iterable[BaseProcess], entries: int) -> None:
    """Wait until the journal has so many entries."""

    def reached() -> bool:
        working(crew)
        return site.entries() >= entries

    site.until(reached, f"the journal has {entries} entries")


def rate(site: Site, first: int, last: int) -> float:
    """Jobs per second between two entries of the journal, by the times at which they were recorded."""
    text: t.LiteralString = """
        SELECT count(*) / greatest(extract(epoch FROM max(recorded_at) - min(recorded_at)), 0.001)::float8
          FROM {q}.journal WHERE id > %s AND id <= %s"""
    return float(site.one(text, first, last))


@attrs.frozen
class Drained:
    """What it was to drain so many jobs.

    Attributes:
        rate: Jobs per second.
        jobs: As many as the costs are of.
        recovery: Of the looks for claims of dead workers.
        every: Of all of the workers' statements.
    """

    rate: float
    jobs: int
    claim: Cost
    settle: Cost
    recovery: Cost
    every: Cost
    rows: Rows
    extra: dict[str, object] = attrs.field(factory=dict[str, object])

    def row(self) -> dict[str, object]:
        """The figures, per job where nothing else is said."""
        other = self.every.buffers - self.claim.buffers - self.settle.buffers
        return {
            "jobs/s": round(self.rate),
            "us": round(1e6 / self.rate, 1),
            "jobs a claim": round(self.jobs / max(1, self.claim.calls), 1),
            "claim ms": round(self.claim.mean, 2),
            "longest claim ms": round(self.claim.longest, 1),
            "settle ms": round(self.settle.mean, 2),
            "longest recovery ms": round(self.recovery.longest, 1),
            "claim buffers": round(self.claim.buffers / self.jobs, 1),
            "settle buffers": round(self.settle.buffers / self.jobs, 1),
            "other buffers": round(other / self.jobs, 1),
            "rows read": round(self.rows.read / self.jobs, 1),
            "index entries read": round(self.rows.entries / self.jobs, 1),
            "rows written": round(self.rows.written / self.jobs, 1),
            "HOT %": round(100 * self.rows.hot / max(1, self.rows.updated)),
            **self.extra,
        }


def drain(site: Site, jobs: int, *duties: Duty) -> Drained:
    """Let the crew work until so many jobs are done."""
    before, first = site.rows(), site.entries()
    site.forget()
    with crew(site, *duties) as processes:
        reach(site, processes, first + jobs)
    claim, settle, recovery, every = (site.cost(like) for like in (CLAIM, SETTLE, RECOVERY, ANY))
    done, after = site.entries() - first, site.rows()
    return Drained(rate(site, first, first + jobs), done, claim, settle, recovery, every, after - before)
