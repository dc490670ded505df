"""What it costs to delete history, and what a partitioned journal would cost.

``python -m tests.benchmarks retention --help``.

First a queue with millions of completed jobs, half of them old enough to go: a worker drains by itself, then beside
``queue.cleanup()``, and then the cleanup goes on alone. Then the same entries in copies of the journal, one plain and
one partitioned by day for each number of days: the inserts of a worker, the look-up of a job's entries, and what it
costs to let one day's go.
"""

from __future__ import annotations

import collections.abc as cabc
import contextlib
import datetime as dt
import itertools
import multiprocessing
import time

import venturi

from . import ground
from .crew import KINDS, Duty, crew, working
from .ground import CLAIM, SCHEMA, Site
from .partitions import compared

CLEANUP = "%doomed AS MATERIALIZED%"
DAYS = 60
SAMPLE = 2.0
"""Seconds between two looks at how far the cleanup is."""


def clean(dsn: str, before: dt.datetime) -> None:
    """What the process does that cleans up."""
    venturi.Queue(dsn=dsn).cleanup(finished_before=before)


@contextlib.contextmanager
def cleaning(site: Site, on: bool) -> cabc.Generator[cabc.Callable[[], bool]]:
    """A process that deletes what is older than half of the time; whether it is still at it."""
    before = dt.datetime.now(dt.UTC) - dt.timedelta(days=DAYS / 2)
    process = multiprocessing.get_context("spawn").Process(target=clean, args=(site.dsn, before))
    if not on:
        yield lambda: True
        return

    def busy() -> bool:
        if process.exitcode:
            raise SystemExit(f"the cleanup ended with {process.exitcode}")
        return process.is_alive()

    process.start()
    try:
        yield busy
    finally:
        process.terminate()
        process.join(60)


def phase(site: Site, name: str, seconds: float, duties: cabc.Sequence[Duty], *, clean: bool) -> dict[str, object]:
    """Let worker and cleanup work for some time, together or one of them, and tell what came of it."""
    site.forget()
    with crew(site, *duties) as processes, cleaning(site, clean) as busy:
        time.sleep(1)
        begun, done, deleted = time.monotonic(), site.entries(), [_deleted(site)]
        while time.monotonic() - begun < seconds and busy():
            time.sleep(SAMPLE)
            working(processes)
            deleted.append(_deleted(site))
        took, done = time.monotonic() - begun, site.entries() - done
    cost, claim = site.cost(CLEANUP), site.cost(CLAIM)
    steps = [(later - earlier) / SAMPLE for earlier, later in itertools.pairwise(deleted)] or [0.0]
    fifth = max(1, len(steps) // 5)
    cleaned = max(1, 1000 * cost.calls)
    return {
        "phase": name,
        "seconds": round(took, 1),
        "jobs/s": round(done / took),
        "claim ms": round(claim.mean, 2),
        "longest claim ms": round(claim.longest, 1),
        "cleaned/s": round((deleted[-1] - deleted[0]) / took),
        "cleaned/s at first": round(sum(steps[:fifth]) / fifth),
        "cleaned/s at last": round(sum(steps[-fifth:]) / fifth),
        "cleanup ms per 1000": round(cost.mean, 1),
        "longest cleanup ms": round(cost.longest, 1),
        "WAL bytes per cleaned job": round(cost.wal / cleaned) if clean else 0,
        "buffers per cleaned job": round(cost.buffers / cleaned, 1) if clean else 0,
        **_sizes(site),
    }


def _deleted(site: Site) -> int:
    return int(site.one("SELECT n_tup_del FROM pg_stat_user_tables WHERE relid = %s::regclass", f"{SCHEMA}.jobs"))


def _sizes(site: Site) -> dict[str, object]:
    sizes: dict[str, object] = {}
    for name in ("jobs", "journal"):
        heap, index, dead = site.ask(
            """SELECT pg_table_size(relid), pg_indexes_size(relid), n_dead_tup
                 FROM pg_stat_user_tables WHERE relid = %s::regclass""",
            f"{SCHEMA}.{name}",
        )[0]
        sizes[f"{name} MB"] = heap >> 20
        sizes[f"{name} indexes MB"] = index >> 20
        sizes[f"{name} dead rows"] = dead
    return sizes


def beside(site: Site, rows: int, seconds: float, concurrency: int) -> list[dict[str, object]]:
    """The three phases on a queue with so many completed jobs."""
    for _ in range(10):
        site.retain(rows // 10, KINDS[0], f"{DAYS} days")
    site.fill(round(min(20_000, 10 * rows) * seconds), KINDS[0])  # more than a worker drains in two phases
    site.ready()
    worker = [Duty(concurrency=concurrency)]
    phases: list[tuple[str, list[Duty], bool]] = [
        ("worker alone", worker, False),
        ("worker and cleanup", worker, True),
        ("cleanup alone", [], True),
    ]
    figures: list[dict[str, object]] = []
    for name, duties, clean in phases:
        figures.append(phase(site, name, seconds, duties, clean=clean))
        ground.show(figures[-1])
    return figures


def main(arguments: list[str]) -> None:
    """Run both parts and print them."""
    parser = ground.parser("retention", __doc__)
    parser.add_argument("--rows", type=int, default=10_000_000, help="completed jobs; default: 10 million")
    parser.add_argument(
        "--entries", type=int, default=2_000_000, help="of each copy of the journal; default: 2 million"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of each phase; default: 60")
    parser.add_argument("--only", choices=["cleanup", "partitions"], help="one part; default: both")
    options = parser.parse_args(arguments)
    rows, entries = (max(2000, round(size * options.scale)) for size in (options.rows, options.entries))
    with ground.server(options.dsn) as dsn:
        if options.only != "partitions":
            with ground.database(dsn) as site:
                ground.table(beside(site, rows, options.seconds, options.concurrency))
        if options.only != "cleanup":
            with ground.database(dsn) as site:
                ground.table(compared(site, entries))
