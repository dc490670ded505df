"""How the cost of a job grows with what surrounds it: ``python -m tests.benchmarks growth --help``.

Each case fills a fresh database and lets real worker processes drain a part of it. The figures are per job, and
beside them stands how many times those of the smallest case they are.
"""

from __future__ import annotations

import collections.abc as cabc

import attrs
import psycopg

from . import ground
from .crew import CAPPED, KINDS, Drained, Duty, drain, rate
from .ground import STRANGER, Site

FOREIGN = "growth.foreign"
COMPARED = ("us", "claim ms", "claim buffers", "settle buffers", "rows read", "index entries read")
"""Figures that are also given as a multiple of the smallest case's."""

SHOWN = (
    "case", "jobs/s", "us x", "claim ms", "longest claim ms", "settle ms", "longest recovery ms",
    "claim buffers", "settle buffers", "other buffers", "rows read", "index entries read", "last/first",
)  # fmt: skip
"""The columns of the table; the lines before it have all figures."""


@attrs.frozen
class Size:
    """The sizes of a run.

    Attributes:
        scale: What they are multiplied with.
        duty: Of each worker.
    """

    scale: float
    duty: Duty

    def __call__(self, promised: int) -> int:
        return max(200, round(promised * self.scale))

    @property
    def jobs(self) -> int:
        """As many as each case drains, unless it needs more."""
        return self(20_000)


def fresh(site: Site, size: Size) -> Drained:
    """Nothing but the jobs that are drained."""
    return _behind(site, size)


def pending_10k(site: Site, size: Size) -> Drained:
    """10 000 more of the same kind after them."""
    return _backlog(site, size, size(10_000))


def pending_1m(site: Site, size: Size) -> Drained:
    """A million more of the same kind after them."""
    return _backlog(site, size, size(1_000_000))


def behind_foreign(site: Site, size: Size) -> Drained:
    """Behind a million of a kind without a handler."""
    site.fill(size(1_000_000), FOREIGN, start="-2 hours")
    return _behind(site, size)


def behind_capped(site: Site, size: Size) -> Drained:
    """Behind a million of a kind that is at its cap."""
    site.fill(size(1_000_000), CAPPED, start="-2 hours")
    return _behind(site, size, duty=attrs.evolve(size.duty, capped=True))


def before_future(site: Site, size: Size) -> Drained:
    """With a million of the same kind that are not due yet."""
    site.fill(size(1_000_000), KINDS[0], start="1 day")
    return _behind(site, size)


def retained_1m(site: Site, size: Size) -> Drained:
    """With a million completed jobs kept."""
    site.retain(size(1_000_000), KINDS[0])
    return _behind(site, size)


def retained_10m(site: Site, size: Size) -> Drained:
    """With ten million completed jobs kept."""
    for _ in range(10):
        site.retain(size(1_000_000), KINDS[0])
    return _behind(site, size)


def kinds_30(site: Site, size: Size) -> Drained:
    """Evenly of 30 kinds, all of them with handlers."""
    return _behind(site, size, duty=attrs.evolve(size.duty, kinds=len(KINDS)), kinds=KINDS)


def in_flight_50k(site: Site, size: Size) -> Drained:
    """Behind 50 000 that another worker holds."""
    held = size(50_000)
    site.fill(held, KINDS[0], start="-2 hours", owner=STRANGER)
    site.ask(
        """INSERT INTO {q}.workers (id, host, pid, slots, kinds, lease, started_at, seen_at)
           VALUES (%s, 'elsewhere', 1, %s, %s, '1 day', now(), now())""",
        STRANGER, held, KINDS[:1],
    )  # fmt: skip
    return _behind(site, size)


def workers_1(site: Site, size: Size) -> Drained:
    """100 000 by one worker."""
    return _behind(site, size, jobs=size(100_000))


def workers_4(site: Site, size: Size) -> Drained:
    """100 000 by four workers."""
    return _behind(site, size, jobs=size(100_000), workers=4)


def workers_16(site: Site, size: Size) -> Drained:
    """100 000 by sixteen workers."""
    return _behind(site, size, jobs=size(100_000), workers=16)


def passing_200k(site: Site, size: Size) -> Drained:
    """200 000 pass, and no snapshot is open: what the next case is compared with."""
    site.fill(size(200_000), KINDS[0])
    site.ready()
    return _passing(site, size)


def old_snapshot(site: Site, size: Size) -> Drained:
    """200 000 pass while one old snapshot is open, so that no dead row can be removed."""
    site.fill(size(200_000), KINDS[0])
    site.ready()
    with psycopg.connect(site.dsn) as reader:
        reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        reader.execute("SELECT 1")
        return _passing(site, size)


CASES: dict[str, cabc.Callable[[Site, Size], Drained]] = {
    case.__name__: case
    for case in (
        fresh, pending_10k, pending_1m, behind_foreign, behind_capped, before_future, retained_1m, retained_10m,
        kinds_30, in_flight_50k, workers_1, workers_4, workers_16, passing_200k, old_snapshot,
    )
}  # fmt: skip


def _behind(
    site: Site,
    size: Size,
    *,
    jobs: int | None = None,
    workers: int = 1,
    duty: Duty | None = None,
    kinds: cabc.Sequence[str] = KINDS[:1],
) -> Drained:
    """Add the jobs to what is there, and drain them."""
    count = jobs or size.jobs
    site.fill(count, *kinds)
    site.ready()
    return drain(site, count, *[duty or size.duty] * workers)


def _backlog(site: Site, size: Size, more: int) -> Drained:
    site.fill(size.jobs + more, KINDS[0])
    site.ready()
    return drain(site, size.jobs, size.duty)


def _passing(site: Site, size: Size) -> Drained:
    """Drain all that is there, and compare the last tenth with the first."""
    jobs, first = size(200_000), site.entries()
    drained = drain(site, jobs, size.duty)
    window = jobs // 10
    early, late = rate(site, first, first + window), rate(site, first + jobs - window, first + jobs)
    extra: dict[str, object] = {
        "first 20k/s": round(early),
        "last 20k/s": round(late),
        "last/first": _ratio(late, early),
    }
    return attrs.evolve(drained, extra=extra)


def _ratio(one: float, other: float) -> float:
    return round(one / other, 2) if other else 0.0


def _compared(row: dict[str, object], least: dict[str, object]) -> dict[str, object]:
    """The row with its multiples of the smallest case's figures."""
    multiples = {f"{name} x": _ratio(float(str(row[name])), float(str(least[name]))) for name in COMPARED}
    return {**row, **multiples}


def main(arguments: list[str]) -> None:
    """Run the cases and print them."""
    described = "\n".join(f"  {name:15} {case.__doc__}" for name, case in CASES.items())
    parser = ground.parser("growth", f"{__doc__}\n{described}")
    parser.add_argument("--only", default=",".join(CASES), help="comma-separated cases; default: all")
    options = parser.parse_args(arguments)
    names = options.only.split(",")
    if unknown := set(names) - CASES.keys():
        parser.error(f"--only: there is no case {sorted(unknown)[0]!r}")
    size = Size(options.scale, Duty(concurrency=options.concurrency))
    rows: list[dict[str, object]] = []
    with ground.server(options.dsn) as dsn:
        for name in dict.fromkeys(["fresh", *names]):
            with ground.database(dsn) as site:
                row: dict[str, object] = {"case": name, **CASES[name](site, size).row()}
            rows.append(_compared(row, rows[0] if rows else row))
            ground.show(rows[-1])
    ground.table(rows, *SHOWN)
