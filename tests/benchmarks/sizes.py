"""How the drain goes by concurrency, payload, work and processes: ``python -m tests.benchmarks sizes --dsn DSN``.

Each row is a drain in a schema of its own, done as often as there are rounds, with the rows in turns; the table has the
medians.
"""

from __future__ import annotations

import argparse
import collections.abc as cabc
import itertools
import statistics
import typing as t

from venturi.bench.options import Options
from venturi.bench.program import measure

from . import ground

__all__ = ["main"]

Row: t.TypeAlias = tuple[int, int, int, int]

TITLES = ("concurrency", "payload, B", "sleep, ms", "processes", "drain, jobs/s")


def _rows(options: argparse.Namespace) -> cabc.Iterator[Row]:
    concurrencies = [int(number) for number in options.concurrency.split(",")]
    for concurrency, (payload, sleep) in itertools.product(concurrencies, ((0, 0), (200, 0), (200, 1))):
        yield concurrency, payload, sleep, 1
    yield concurrencies[-1], 200, 0, 2
    yield concurrencies[-1], 200, 1, 2


def _jobs(row: Row, jobs: int) -> int:
    """Fewer where a few slots sleep, so that a row takes seconds."""
    concurrency, _, sleep, processes = row
    return min(jobs, 1000 * concurrency * processes if sleep or concurrency == 1 else jobs)


def main(arguments: list[str]) -> None:
    """Drain by every row, print each, and then the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks sizes", description=__doc__)
    parser.add_argument("--dsn", required=True, help="of a role that may create schemas")
    parser.add_argument("--jobs", type=int, default=20000)
    parser.add_argument("--concurrency", default="1,8,20,100")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    found: dict[Row, list[float]] = {}
    for _, row in itertools.product(range(options.rounds), _rows(options)):
        concurrency, payload, sleep, processes = row
        result = measure(
            Options(
                dsn=options.dsn, jobs=_jobs(row, options.jobs), concurrency=concurrency, payload=payload, sleep=sleep,
                processes=processes, only=("drain",),
            ),
            lambda line: None,
        )  # fmt: skip
        if not found:
            ground.show(result.settings)
        found.setdefault(row, []).append(result.figures["drain"]["per_s"])
    ground.table([dict(zip(TITLES, (*row, round(statistics.median(own))), strict=True)) for row, own in found.items()])
