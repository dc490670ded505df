"""The commands that change a queue: cancel, requeue and cleanup; and the demo."""

from __future__ import annotations

import argparse
import datetime as dt
import sys
import typing as t

from venturi.cli.database import opened
from venturi.errors import VenturiError
from venturi.store.connections import Session, resolve

__all__ = ["cancel", "cleanup", "demo", "requeue"]


def cancel(given: argparse.Namespace) -> int:
    """Cancel one job."""
    with opened(given) as (queue, session), session.transaction():
        if not queue.cancel(given.id, conn=session):
            raise VenturiError(f"there is no unfinished job {given.id}")
    print("cancelled")
    return 0


def requeue(given: argparse.Namespace) -> int:
    """Send one dead job back, or those of a kind."""
    if (given.id is None) == (given.kind is None):
        given.usage_error("give either a job's id or --kind")
    if given.id is not None and given.limit is not None:
        given.usage_error("--limit goes with --kind")
    with opened(given) as (queue, session):
        if given.id is None:
            limit = 1000 if given.limit is None else given.limit
            number = queue.requeue_many(kind=given.kind, limit=limit, conn=session)
        else:
            number = int(queue.requeue(given.id, conn=session))
    if given.id is not None and not number:
        raise VenturiError(f"there is no dead job {given.id}")
    print(f"requeued: {number}")
    return 0


def cleanup(given: argparse.Namespace) -> int:
    """Delete finished jobs."""
    with opened(given) as (queue, session):
        number = queue.cleanup(finished_before=_instant(session, given.before), kind=given.kind, status=given.status)
    print(f"deleted: {number}")
    return 0


def _instant(session: Session, when: dt.datetime | dt.timedelta) -> dt.datetime:
    """The instant meant; how long ago is counted from the database's now, by which jobs finish."""
    if isinstance(when, dt.datetime):
        return when
    ((now,),) = session.execute("SELECT statement_timestamp()").fetchall()
    try:
        return t.cast("dt.datetime", now - when)
    except OverflowError:
        return dt.datetime.min.replace(tzinfo=dt.UTC)


def demo(given: argparse.Namespace) -> int:
    """Index a folder."""
    # Imported here: it declares tasks and handlers of its own.
    from venturi.demo import run

    resolve(given.dsn)
    return run(
        given.folder, dsn=given.dsn, fresh=given.fresh, concurrency=given.concurrency, terminal=sys.stdout.isatty()
    )
