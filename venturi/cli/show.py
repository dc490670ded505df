"""The commands that look: stats, job, jobs and journal."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import typing as t
from collections.abc import Sequence

import attrs

from venturi.cli.database import opened
from venturi.errors import VenturiError
from venturi.values import Entry, Job

__all__ = ["job", "jobs", "journal", "stats", "table"]


def stats(given: argparse.Namespace) -> int:
    """How many jobs of each kind wait for what."""
    with opened(given) as (queue, session):
        found = queue.stats(conn=session)
    rows = [
        (kind, n.ready, n.scheduled, n.claimed, n.dead, _age(n.oldest_ready), "yes" if n.served else "no")
        for kind, n in sorted(found.kinds.items())
    ]
    table(("kind", "ready", "scheduled", "claimed", "dead", "oldest", "served"), rows)
    print(f"workers: {found.workers}")
    if found.unserved:
        print(f"ready, but handled by no worker: {', '.join(map(_plain, found.unserved))}")
    return 0


def job(given: argparse.Namespace) -> int:
    """One job."""
    with opened(given) as (queue, session):
        found = queue.job(given.id, conn=session)
    if found is None:
        raise VenturiError(f"there is no job {given.id}")
    values = attrs.asdict(found, recurse=False)
    texts = {name: json.dumps(values.pop(name)) for name in ("payload", "carry")}
    for name, value in {**values, **(texts if given.payload else {})}.items():
        print(f"{name:<14} {_text(value)}")
    return 0


def jobs(given: argparse.Namespace) -> int:
    """A page of jobs."""
    with opened(given) as (queue, session):
        page = queue.jobs(kind=given.kind, status=given.status, before=given.before, limit=given.limit, conn=session)
    table(("id", "kind", "status", "priority", "runs", "failures", "created"), [_columns(each) for each in page])
    return 0


def _columns(job: Job) -> tuple[object, ...]:
    return job.id, job.kind, job.status, job.priority.name, job.run_count, job.failure_count, job.created_at


def journal(given: argparse.Namespace) -> int:
    """What happened to a job."""
    with opened(given) as (queue, session):
        entries = queue.journal(given.id, conn=session)
        if not entries and queue.job(given.id, conn=session) is None:
            raise VenturiError(f"there is no job {given.id}")
    for entry in entries:
        _tell(entry)
    return 0


def _tell(entry: Entry) -> None:
    took = "" if entry.duration is None else f" after {entry.duration.total_seconds():.3f} s"
    print(f"{_text(entry.recorded_at)}  run {entry.run_no}  {entry.outcome}{took}, {entry.failure_count} failures")
    if entry.note:
        print(f"    {_plain(entry.note)}")
    if entry.evidence is not None:
        print(f"    {json.dumps(entry.evidence)}")
    for line in (entry.traceback or "").splitlines():
        print(f"    | {_plain(line)}")


def table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows below their titles, in columns."""
    lines = [tuple(titles), *(tuple(map(_text, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def _text(value: t.Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dt.datetime):
        return value.isoformat(sep=" ", timespec="seconds")
    return _plain(getattr(value, "name", None) or str(value))


def _age(span: dt.timedelta | None) -> str:
    return "-" if span is None else str(dt.timedelta(seconds=int(span.total_seconds())))


def _plain(text: str) -> str:
    """Text on one line, without anything that a terminal would obey."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
