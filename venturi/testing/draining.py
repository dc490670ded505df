"""Run the queued jobs on the test's own connection.

The pieces are those of a worker: its claim, its runner, its settle. What differs is the clock, which stands still, the
connection, which is lent to the handlers too, and that one job runs after the other.
"""

from __future__ import annotations

import collections
import datetime as dt
import logging
import math
import os
import typing as t
import uuid
from collections.abc import Generator
from contextlib import contextmanager

import attrs
import psycopg
from psycopg.pq import TransactionStatus

from venturi import checks
from venturi.context import RunSignal
from venturi.errors import ConfigError
from venturi.outcome import Outcome
from venturi.queue import Queue
from venturi.registry import Bound, Handler
from venturi.store.claiming import Claim, Claiming, Ending, WorkerRow
from venturi.store.connections import Connection, run, schema_errors
from venturi.store.sql import LATEST_INSTANT, Sql
from venturi.testing.lending import chosen
from venturi.values import JournalOutcome
from venturi.worker.flight import Run
from venturi.worker.lanes import Lanes
from venturi.worker.marks import Marks
from venturi.worker.rotation import Rotation
from venturi.worker.runner import Runner
from venturi.worker.settings import Settings

__all__ = ["Ran", "drain"]

logger: logging.Logger = logging.getLogger("venturi.testing")

STEP = dt.timedelta(microseconds=10)
"""How far the clock goes with each statement: what is written later is due later, and order holds."""


@attrs.frozen
class Ran:
    """One run of `drain`.

    Attributes:
        task: The task; None when it could not be decoded.
        outcome: As in the journal: ``completed``, ``paused``, ``retried``, ``dead`` or ``cancelled``.
        note: As in the journal.
        error: What the handler raised; None when it returned.
    """

    id: uuid.UUID
    kind: str
    task: t.Any
    outcome: JournalOutcome
    note: str | None
    error: BaseException | None


def drain(
    conn: Connection,
    /,
    *,
    queue: Queue[t.Any] | None = None,
    now: dt.datetime | dt.timedelta = dt.timedelta(0),
    state: object = None,
    limit: int = 1000,
    backstop: int | None = 25,
) -> list[Ran]:
    """Run the due jobs with the queue's handlers, on this connection and thread, until none is left.

    Everything happens in the connection's transaction, which is begun where there is none and never committed. The
    handlers use the connection too where they call the queue without ``conn=``, and what they enqueue runs in the same
    call. Each handler runs in a savepoint, which is rolled back when its run fails. A connection that a handler opens
    by itself sees nothing of the test's transaction, and commits.

    The clock stands still: a retry and a pause are due that long after ``now``, for a later call to run. Jobs run
    strictly by priority, then by when they became due. Jobs of kinds without a handler are left pending.

    Args:
        conn: The test's connection. In autocommit mode it must be inside a transaction.
        queue: Default: None, the default queue.
        now: The clock of this call: an aware instant, or how far it is ahead of the database's. Default: the
            database's.
        state: Given to the handlers as ``ctx.state``. Default: None.
        limit: Most runs, at least 1. Default: 1000.
        backstop: Failures until a job is dead; None never. Default: 25.

    Returns:
        The runs in order. A failed one is also logged, with its traceback.

    Raises:
        AssertionError: There were still due jobs after ``limit`` runs.
        BaseException: A handler raised something that is no Exception, as pytest.fail() does; its run is recorded as
            failed before.
        ConfigError: The queue has no handlers, or an option is wrong.
        SchemaError: The queue was never migrated.
    """
    drained = chosen(queue)
    checks.whole("limit", limit, 1)
    _check(conn)
    clock = _Clock(drained.schema, _instant(conn, now))
    with drained.store.lent(conn, clock), _unprepared(conn), schema_errors(drained.schema):
        return _Drain(conn, drained, clock, state, backstop).runs(limit)


def _check(conn: Connection) -> None:
    if not isinstance(conn, psycopg.Connection):  # pyright: ignore[reportUnnecessaryIsInstance] - not all are typed
        raise TypeError(f"conn must be a psycopg.Connection, not {type(conn).__name__}")
    if conn.autocommit and conn.info.transaction_status == TransactionStatus.IDLE:
        raise ConfigError("drain() needs a transaction: wrap it in `with conn.transaction():`")


class _Drain:
    def __init__(
        self, connection: Connection, queue: Queue[t.Any], clock: _Clock, state: object, backstop: int | None
    ) -> None:
        settings = Settings.of({"concurrency": 1, "backstop": backstop})
        queue.registry.bind()
        self._connection = connection
        self._queue = queue
        self._clock = clock
        self._lanes = Lanes(queue.registry, 1, Rotation(None), Marks(sweep=0))
        worker = uuid.uuid4()
        row = WorkerRow(worker, "test", os.getpid(), 1, self._lanes.kinds, dt.timedelta(hours=1))
        self._claiming = Claiming(clock, row)
        self._runner = Runner(worker, settings, state, queue.telemetry, queue.store.history)

    def runs(self, limit: int) -> list[Ran]:
        ran: list[Ran] = []
        while len(ran) < limit:
            claim = self._claim()
            if claim is None:
                return ran
            ran.append(self._run(claim))
        if self._due():
            kind = collections.Counter(each.kind for each in ran).most_common(1)[0][0]
            raise AssertionError(
                f"jobs are still due after {limit} runs, most of them of the kind {kind!r}: "
                "do they enqueue one another, or pause without a delay?"
            )
        return ran

    def _claim(self) -> Claim | None:
        claims = self._claiming.turn(self._connection, [], self._lanes.ask(0.0)).claims
        return claims[0] if claims else None

    def _due(self) -> bool:
        seconds = self._claiming.next_due(self._connection, *self._lanes.open())
        return seconds is not None and seconds <= 0

    def _run(self, claim: Claim) -> Ran:
        witness = _Witness()
        ending = self._ending(Run(claim, witness.of(self._queue.registry.find(claim.kind)), RunSignal(math.inf)))
        self._claiming.settle(self._connection, [ending])
        # A handler may have asked to cancel its own job.
        self._claiming.cancels(self._connection, [])
        error = witness.error
        if ending.outcome in ("retried", "dead"):
            logger.warning("%s %s: %s", claim.kind, ending.outcome, ending.note, exc_info=error)
        if error is not None and not isinstance(error, Exception):
            raise error
        return Ran(claim.id, claim.kind, witness.task, ending.outcome, ending.note, error)

    def _ending(self, run: Run) -> Ending:
        """Run the handler, and keep what it wrote when it succeeds."""
        with self._connection.transaction():
            ending = self._runner(run)
            failed = self._connection.info.transaction_status == TransactionStatus.INERROR
            if failed or ending.outcome not in ("completed", "paused"):
                raise psycopg.Rollback
        return ending


@attrs.define
class _Witness:
    """Sees what the runner keeps to itself: the decoded task, and what the handler raised."""

    task: t.Any = None
    error: BaseException | None = None

    def of(self, bound: Bound) -> Bound:
        """The same with a handler that is watched."""
        handler = bound.handler

        def watched(task: t.Any, *rest: t.Any) -> Outcome:
            self.task = task
            try:
                return handler.fn(task, *rest)
            except BaseException as error:
                self.error = error
                raise

        return attrs.evolve(bound, handler=Handler(watched, task=bound.task.cls, dead_on=handler.dead_on))


class _Clock(Sql):
    """Statements whose clock stands still, but for a step with each of them."""

    def __init__(self, schema: str, instant: dt.datetime) -> None:
        super().__init__(schema, now="{clock}", notify=False)
        self._instant = instant

    def __call__(self, template: str) -> bytes:
        self._instant = min(self._instant + STEP, LATEST_INSTANT)
        return super().__call__(template).replace(b"{clock}", f"'{self._instant.isoformat()}'::timestamptz".encode())


def _instant(conn: Connection, now: object) -> dt.datetime:
    if not isinstance(now, dt.timedelta):
        return min(checks.instant("now", now), LATEST_INSTANT)
    started: dt.datetime = run(conn, b"SELECT statement_timestamp()").fetchall()[0][0].astimezone(dt.UTC)
    return started + min(now, LATEST_INSTANT - started)


@contextmanager
def _unprepared(conn: Connection) -> Generator[None]:
    """Prepare nothing for the time of the block: with the clock in its text, no statement comes twice."""
    before, conn.prepare_threshold = conn.prepare_threshold, None
    try:
        yield
    finally:
        conn.prepare_threshold = before
