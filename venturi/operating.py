"""The verbs of operators."""

from __future__ import annotations

import datetime as dt
import sys
import typing as t
import uuid
from collections.abc import Sequence

from venturi import checks
from venturi.enqueuing import wait
from venturi.errors import ConfigError
from venturi.registry import Registry
from venturi.store.connections import Connection
from venturi.store.looking import FINISHED
from venturi.store.store import Store
from venturi.values import Entry, Job, Stats, Status

__all__ = ["Operating"]

_STATUSES = t.get_args(Status)


class Operating:
    """What operators ask of a queue."""

    registry: Registry
    store: Store

    def job(self, id: uuid.UUID, /, *, conn: Connection | None = None) -> Job | None:
        """One job as it stands; None when the id is unknown.

        Raises:
            TypeError: The id is no UUID.
            SchemaError: The schema is missing or of another version.
        """
        with self.store.borrowed(conn) as connection:
            return self.store.looking.job(connection, _id(id))

    def jobs(
        self,
        *,
        kind: str | None = None,
        status: Status | None = None,
        before: uuid.UUID | None = None,
        finished_since: dt.datetime | None = None,
        finished_until: dt.datetime | None = None,
        limit: int = 100,
        conn: Connection | None = None,
    ) -> list[Job]:
        """A page of jobs, newest first by id.

        Args:
            kind: Only this kind, with its aliases where this queue knows them. Default: None, all.
            status: Only this status. Default: None, all.
            before: Only ids before this one: the last of the page before. Default: None, from the newest.
            finished_since: Only jobs that finished then or later; leaves out unfinished ones. Default: None.
            finished_until: Only jobs that finished before; leaves out unfinished ones. Default: None.
            limit: Most jobs to give, 1 to 1000. Default: 100.

        Raises:
            ConfigError: An option is out of its bounds, or a datetime is naive.
            TypeError: ``before`` is no UUID, or what should be a datetime is none.
            SchemaError: The schema is missing or of another version.
        """
        if status is not None and status not in _STATUSES:
            raise ConfigError(f"status={status!r}: must be one of {', '.join(_STATUSES)}")
        since = None if finished_since is None else checks.instant("finished_since", finished_since)
        until = None if finished_until is None else checks.instant("finished_until", finished_until)
        number = checks.whole("limit", limit, 1, 1000)
        kinds = self._kinds(kind)
        with self.store.borrowed(conn) as connection:
            return self.store.looking.jobs(
                connection,
                kinds=kinds,
                status=status,
                before=None if before is None else _id(before),
                since=since,
                until=until,
                limit=number,
            )

    def journal(self, id: uuid.UUID, /, *, conn: Connection | None = None) -> list[Entry]:
        """Everything recorded of a job, oldest first; an empty list when the id is unknown.

        Raises:
            TypeError: The id is no UUID.
            SchemaError: The schema is missing or of another version.
        """
        with self.store.borrowed(conn) as connection:
            return self.store.looking.journal(connection, _id(id))

    def stats(self, *, conn: Connection | None = None) -> Stats:
        """How many jobs of each kind are ready, scheduled, claimed and dead, in one consistent snapshot.

        Raises:
            SchemaError: The schema is missing or of another version.
        """
        with self.store.borrowed(conn) as connection:
            return self.store.looking.stats(connection)

    def cancel(self, id: uuid.UUID, /, *, conn: Connection | None = None) -> bool:
        """Cancel a job: a pending one never runs, the run of a claimed one is told to stop.

        Such a run that returns None or `Completed` completes its job all the same; with any other end, a `Pause`
        or an error, the job is cancelled.

        Returns:
            False when the job is finished or unknown; nothing changes then.

        Raises:
            TypeError: The id is no UUID.
            SchemaError: The schema is missing or of another version.
        """
        with self.store.transaction(conn) as connection:
            return self.store.looking.cancel(connection, _id(id), notify=self.store.notify)

    def requeue(self, id: uuid.UUID, /, *, delay: dt.timedelta | None = None, conn: Connection | None = None) -> bool:
        """Send a dead job back: same id, payload, priority, key and carry, no failures.

        Args:
            delay: Due that long from now; zero or negative is now. Default: None, now.

        Returns:
            False when the job is not dead; nothing changes then.

        Raises:
            TypeError: The id is no UUID, or ``delay`` no timedelta.
            SchemaError: The schema is missing or of another version.
        """
        return self._requeue(_id(id), None, 1, delay, conn) == 1

    def requeue_many(
        self,
        *,
        kind: str | None = None,
        limit: int = 1000,
        delay: dt.timedelta | None = None,
        conn: Connection | None = None,
    ) -> int:
        """Send dead jobs back, the longest dead first.

        Args:
            kind: Only this kind. Default: None, all.
            limit: Most jobs to send back, at least 1. Default: 1000.
            delay: Due that long from now. Default: None, now.

        Returns:
            How many.

        Raises:
            ConfigError: ``limit`` is below 1, or ``kind`` cannot be one.
            TypeError: ``delay`` is no timedelta.
            SchemaError: The schema is missing or of another version.
        """
        return self._requeue(None, self._kinds(kind), checks.whole("limit", limit, 1, sys.maxsize), delay, conn)

    def _requeue(
        self,
        id: uuid.UUID | None,
        kinds: Sequence[str] | None,
        limit: int,
        delay: dt.timedelta | None,
        conn: Connection | None,
    ) -> int:
        span = wait(delay)
        with self.store.transaction(conn) as connection:
            number = self.store.looking.requeue(connection, id=id, kinds=kinds, limit=limit, delay=span)
        if conn is None and number:
            self.store.local.wake()
        return number

    def cleanup(self, *, finished_before: dt.datetime, kind: str | None = None, status: Status | None = None) -> int:
        """Delete finished jobs with all their journal entries, oldest first, in transactions of at most 1000 jobs each.

        Args:
            finished_before: Only jobs that finished strictly before this aware instant.
            kind: Only this kind. Default: None, all.
            status: Only ``completed``, ``dead`` or ``cancelled`` jobs. Default: None, all three.

        Returns:
            How many jobs were deleted.

        Raises:
            ConfigError: The instant is naive, the status is not one of finished jobs, or ``kind`` cannot be one.
            TypeError: ``finished_before`` is no datetime.
            SchemaError: The schema is missing or of another version.
        """
        if status is not None and status not in tuple(FINISHED):
            raise ConfigError(f"status={status!r}: must be one of {', '.join(FINISHED)}")
        before = checks.instant("finished_before", finished_before)
        statuses = list(FINISHED) if status is None else [status]
        kinds = self._kinds(kind)
        deleted = 0
        while True:
            with self.store.borrowed(None) as connection:
                batch = self.store.looking.cleanup(connection, finished_before=before, kinds=kinds, statuses=statuses)
            deleted += batch
            if batch == 0:
                return deleted

    def _kinds(self, kind: str | None) -> tuple[str, ...] | None:
        return None if kind is None else self.registry.names(checks.kind("kind", kind))


def _id(value: object) -> uuid.UUID:
    if not isinstance(value, uuid.UUID):
        raise TypeError(f"a job's id must be a uuid.UUID, not {type(value).__name__}")
    return value
