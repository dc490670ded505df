"""What operators ask and do: look at jobs, cancel, requeue, clean up. Every function works on any connection."""

from __future__ import annotations

import datetime as dt
import typing as t
import uuid
from collections.abc import Sequence

from venturi import codec
from venturi.store import looking_sql, sql
from venturi.store.connections import Connection, run
from venturi.values import Entry, Job, KindStats, Priority, Stats

__all__ = ["Looking"]

HISTORY = 50
CLEANUP_BATCH = 1000

FINISHED: dict[str, int] = {"completed": 0, "dead": 3, "cancelled": 7}
"""The statuses of finished jobs, and the journal's number of the entry that ended them."""


class Looking:
    """The operators' statements of one queue.

    Those that look for jobs are never prepared: a plan that was kept from a nearly empty table would read all of it
    later, and a caller's session is not ours to set.
    """

    def __init__(self, statements: sql.Sql) -> None:
        self._sql = statements

    def job(self, connection: Connection, id: uuid.UUID) -> Job | None:
        """One job as it stands; None when the id is unknown."""
        rows = run(connection, self._sql(looking_sql.JOB), (id,), prepare=False).fetchall()
        return _job(rows[0]) if rows else None

    def jobs(
        self,
        connection: Connection,
        *,
        kinds: Sequence[str] | None,
        status: str | None,
        before: uuid.UUID | None,
        since: dt.datetime | None,
        until: dt.datetime | None,
        limit: int,
    ) -> list[Job]:
        """Jobs by falling id."""
        names = None if kinds is None else list(kinds)
        page: tuple[object, ...] = (names, names, before, before, since, since, until, until, limit)
        statement, parameters = looking_sql.JOBS, (status, status, *page)
        if status in looking_sql.JOBS_OF:
            statement, parameters = looking_sql.JOBS_OF[status], page
        elif since is not None or until is not None:
            statement, parameters = looking_sql.JOBS_BETWEEN, (since, until, *parameters, *parameters)
        return [_job(row) for row in run(connection, self._sql(statement), parameters, prepare=False).fetchall()]

    def journal(self, connection: Connection, id: uuid.UUID, newest: int | None = None) -> list[Entry]:
        """A job's entries, oldest first; all of them, or the newest ones."""
        rows = run(connection, self._sql(looking_sql.JOURNAL), (id, newest), prepare=False).fetchall()
        return [_entry(row) for row in rows]

    def stats(self, connection: Connection) -> Stats:
        """One snapshot of the queue."""
        kinds: dict[str, KindStats] = {}
        workers = 0
        for kind, ready, scheduled, claimed, dead, oldest, served, live in run(
            connection, self._sql(looking_sql.STATS)
        ).fetchall():
            workers = live
            if kind is not None:
                kinds[kind] = KindStats(ready, scheduled, claimed, dead, oldest, served)
        unserved = tuple(sorted(kind for kind, counts in kinds.items() if counts.ready and not counts.served))
        return Stats(kinds, unserved, workers)

    def cancel(self, connection: Connection, id: uuid.UUID, *, notify: bool) -> bool:
        """Cancel a pending job, or ask for the end of a claimed one; False when it is finished or unknown."""
        # Two statements, so that the second sees the claim for which the first one waited.
        if run(connection, self._sql(looking_sql.CANCEL_PENDING), (id,), prepare=False).fetchall():
            return True
        if not run(connection, self._sql(looking_sql.CANCEL_CLAIMED), (id,), prepare=False).fetchall():
            return False
        if notify:
            run(connection, self._sql(sql.TELL))
        return True

    def requeue(
        self,
        connection: Connection,
        *,
        id: uuid.UUID | None,
        kinds: Sequence[str] | None,
        limit: int,
        delay: dt.timedelta,
    ) -> int:
        """Send dead jobs back, the longest dead first; how many. Inside a transaction."""
        names = None if kinds is None else list(kinds)
        parameters = (id, id, names, names, limit, delay)
        ((number, sent),) = run(connection, self._sql(looking_sql.REQUEUE), parameters, prepare=False).fetchall()
        if number:
            run(connection, self._sql(sql.RUNG), self._sql.rung(sent))
        return int(number)

    def cleanup(
        self,
        connection: Connection,
        *,
        finished_before: dt.datetime,
        kinds: Sequence[str] | None,
        statuses: Sequence[str],
    ) -> int:
        """Delete up to 1000 finished jobs with their entries, the oldest first; how many."""
        names = None if kinds is None else list(kinds)
        outcomes = [FINISHED[status] for status in statuses]
        parameters = (outcomes, finished_before, names, names, CLEANUP_BATCH)
        return int(run(connection, self._sql(looking_sql.CLEANUP), parameters).fetchall()[0][0])


def _job(row: tuple[t.Any, ...]) -> Job:
    id_, kind, status, priority, payload, carry, key, runs, failures, created, visible, owner, lease, finished = row
    return Job(
        id_, kind, status, Priority(priority), _parsed(payload), _parsed(carry), key, runs, failures,
        _utc(created), _utc(visible), owner, _utc(lease), _utc(finished),
    )  # fmt: skip


def _entry(row: tuple[t.Any, ...]) -> Entry:
    id_, job, kind, run_no, failures, outcome, recorded, duration, worker, note, trace, evidence = row
    return Entry(
        id_, job, kind, run_no, failures, outcome, _utc(recorded), duration, worker, note, trace, _parsed(evidence)
    )  # fmt: skip


def _parsed(text: str | None) -> t.Any:
    """The JSON value; the text itself where it is too deep or has too long a number, so that one row spoils no list."""
    if text is None:
        return None
    try:
        return codec.parse(text)
    except (RecursionError, ValueError):
        return text


def _utc(moment: t.Any) -> t.Any:
    return None if moment is None else moment.astimezone(dt.UTC)
