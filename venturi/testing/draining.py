"""Run the queued jobs on the test's own connection."""

from __future__ import annotations

import datetime as dt
import math
import os
import typing as t
import uuid
from collections.abc import Iterator, Sequence

import attrs
import psycopg

from venturi import checks
from venturi.context import RunSignal
from venturi.errors import ConfigError, VenturiError
from venturi.queue import Queue
from venturi.store.claiming import Claim, Claiming, Ending, WorkerRow
from venturi.store.connections import Connection
from venturi.store.sql import Sql
from venturi.values import JournalOutcome
from venturi.worker.flight import Run
from venturi.worker.lanes import Lanes
from venturi.worker.marks import Marks
from venturi.worker.rotation import Rotation
from venturi.worker.runner import Runner
from venturi.worker.settings import Settings

__all__ = ["Drained", "Ran", "drain"]


@attrs.frozen
class Ran:
    """One run of `drain`."""

    id: uuid.UUID
    kind: str
    outcome: JournalOutcome
    note: str | None


@attrs.frozen
class Drained(Sequence[Ran]):
    """The runs of one `drain`, in order."""

    runs: tuple[Ran, ...]

    @t.overload
    def __getitem__(self, index: int) -> Ran: ...
    @t.overload
    def __getitem__(self, index: slice) -> Sequence[Ran]: ...
    def __getitem__(self, index: int | slice) -> Ran | Sequence[Ran]:
        return self.runs[index]

    def __len__(self) -> int:
        return len(self.runs)

    def outcomes(self) -> list[JournalOutcome]:
        """How the runs ended."""
        return [run.outcome for run in self.runs]


def drain(
    conn: Connection,
    /,
    *,
    queue: Queue[t.Any] | None = None,
    now: dt.datetime | dt.timedelta = dt.timedelta(0),
    state: object = None,
    limit: int = 1000,
    backstop: int | None = 25,
) -> Drained:
    """Run the due jobs with the queue's handlers, on this connection and thread, until none is left.

    Everything happens in the connection's transaction, which is begun where there is none and never committed. Jobs
    that handlers enqueue, with ``conn=`` or without, are in it too and run in the same call. Each handler runs in a
    savepoint, which is rolled back when its run fails.

    Args:
        conn: The test's connection, not in autocommit mode unless inside a transaction.
        queue: Default: None, the default queue.
        now: The clock of this call: an aware instant, or how far it is ahead of the database's. Default: the
            database's.
        state: Given to the handlers as ``ctx.state``. Default: None.
        limit: Most runs, at least 1. Default: 1000.
        backstop: Failures until a job is dead; None never. Default: 25.

    Returns:
        The runs in order.

    Raises:
        VenturiError: There were still due jobs after ``limit`` runs: they enqueue one another without end.
        ConfigError: The queue has no handlers, or an option is wrong.
    """
    if queue is None:
        from venturi import default

        queue = default
    checks.whole("limit", limit, 1)
    if conn.autocommit and conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
        raise ConfigError("drain() needs a transaction: use a connection that is not in autocommit mode")
    runs = tuple(_Drain(conn, queue, now, state, backstop).runs(limit))
    return Drained(runs)


class _Drain:
    def __init__(
        self,
        connection: Connection,
        queue: Queue[t.Any],
        now: dt.datetime | dt.timedelta,
        state: object,
        backstop: int | None,
    ) -> None:
        registry, settings = queue.registry, Settings.of({"concurrency": 1, "backstop": backstop})
        registry.bind()
        self._connection = connection
        self._queue = queue
        self._lanes = Lanes(registry, 1, Rotation(None), Marks(sweep=0))
        worker = uuid.uuid4()
        row = WorkerRow(worker, "test", os.getpid(), 1, self._lanes.kinds, dt.timedelta(hours=1))
        self._claiming = Claiming(Sql(queue.schema, now=_clock(now), notify=False), row)
        self._runner = Runner(worker, settings, state, queue.telemetry, queue.store.history)

    def runs(self, limit: int) -> Iterator[Ran]:
        for _ in range(limit):
            claim = self._claim()
            if claim is None:
                return
            ending = self._run(claim)
            self._claiming.settle(self._connection, [ending])
            yield Ran(ending.id, ending.kind, ending.outcome, ending.note)
        if self._claim() is not None:
            raise VenturiError(f"there are still due jobs after {limit} runs: do they enqueue one another?")

    def _claim(self) -> Claim | None:
        claims = self._claiming.turn(self._connection, [], self._lanes.ask(0.0)).claims
        return claims[0] if claims else None

    def _run(self, claim: Claim) -> Ending:
        run = Run(claim, self._queue.registry.find(claim.kind), RunSignal(math.inf))
        with self._queue.store.lent(self._connection), self._connection.transaction():
            ending = self._runner(run)
            assert ending is not None  # only a lost lease ends a run without an ending
            if ending.outcome not in ("completed", "paused"):
                raise psycopg.Rollback
        return ending


def _clock(now: object) -> str:
    if isinstance(now, dt.timedelta):
        return f"(statement_timestamp() + interval '{now // dt.timedelta(microseconds=1)} microseconds')"
    return f"'{checks.instant('now', now).isoformat()}'::timestamptz"
