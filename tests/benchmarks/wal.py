"""Write-ahead log per job, step by step through its life: ``python -m tests.benchmarks wal --help``.

On a private server without full page writes, and on one with them. Each step begins with a checkpoint, so that with
full page writes it pays for an image of each page that it is the first to touch.
"""

from __future__ import annotations

import collections.abc as cabc

from . import ground
from .crew import STEPS, Drained, Duty, drain
from .ground import Site

CHUNK = 1000


def many(site: Site, jobs: int) -> None:
    """Enqueue in chunks."""
    for first in range(0, jobs, CHUNK):
        site.queue.enqueue_many([STEPS[0](i) for i in range(first, min(jobs, first + CHUNK))])


def single(site: Site, jobs: int) -> None:
    """Enqueue one by one, each committed."""
    for i in range(jobs):
        site.queue.enqueue(STEPS[0](i))


def written(site: Site, work: cabc.Callable[[], object]) -> int:
    """Bytes of write-ahead log that the server wrote for the work."""
    site.ask("CHECKPOINT")
    before = site.position()
    work()
    return site.position() - before


def life(site: Site, jobs: int, ones: int, duty: Duty) -> dict[str, object]:
    """Bytes per job of each step in the life of no-op jobs."""
    bulk = written(site, lambda: many(site, jobs)) / jobs
    alone = written(site, lambda: single(site, ones)) / ones
    site.queue.close()
    every, drains = jobs + ones, list[Drained]()
    run = written(site, lambda: drains.append(drain(site, every, duty))) / every
    vacuum = written(site, lambda: site.ask("VACUUM {q}.live")) / every
    claim, settle = (cost.wal / every for cost in (drains[0].claim, drains[0].settle))
    steps = {
        "enqueue": alone,
        "enqueue_many": bulk,
        "claim and settle": run,
        "of it claim": claim,
        "of it settle": settle,
        "vacuum of the hot table": vacuum,
        "whole life, many": bulk + run,
        "whole life, one by one": alone + run,
    }
    return {name: round(value) for name, value in steps.items()}


def main(arguments: list[str]) -> None:
    """Measure on both servers and print it."""
    parser = ground.parser("wal", __doc__, dsn=False)
    parser.add_argument("--jobs", type=int, default=50_000, help="enqueued in chunks of 1000; default: 50 000")
    parser.add_argument("--singles", type=int, default=5000, help="enqueued one by one; default: 5000")
    options = parser.parse_args(arguments)
    jobs, ones = (max(100, round(size * options.scale)) for size in (options.jobs, options.singles))
    rows: list[dict[str, object]] = []
    for images in ("off", "on"):
        # Without autovacuum, since what it writes meanwhile is no step's.
        with ground.server(None, full_page_writes=images, autovacuum="off") as dsn, ground.database(dsn) as site:
            figures = life(site, jobs, ones, Duty(concurrency=options.concurrency))
        rows.append({"full page writes": images, **figures})
        ground.show(rows[-1])
    ground.table(rows)
