"""The database side of one queue: its statements, and the connections that they run on.

It knows nothing of tasks, handlers or workers, and works without them.
"""

from __future__ import annotations

import threading
import typing as t
import uuid
import weakref
from collections.abc import Callable, Generator, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext

import psycopg
from psycopg.pq import TransactionStatus

from venturi.log import Log, log
from venturi.store import migrate, starting
from venturi.store.connections import Connection, Session, connect, own, readable, resolve, schema_errors
from venturi.store.looking import HISTORY, Looking
from venturi.store.pool import Pool
from venturi.store.producing import Producing
from venturi.store.sql import Sql
from venturi.values import Entry, Stats

__all__ = ["Store", "Wakers"]

logger: Log = log("venturi.worker")


Waker: t.TypeAlias = Callable[[Set[str] | None], None]


class Wakers:
    """The workers of this process, which are woken without a notification by what is committed here."""

    def __init__(self) -> None:
        # No lock, which a fork could find taken: each of these steps of a dict is one.
        self._wakers: dict[Waker, None] = {}

    def add(self, wake: Waker) -> None:
        """From now on call this, from any thread."""
        self._wakers[wake] = None

    def remove(self, wake: Waker) -> None:
        """Call it no more."""
        self._wakers.pop(wake, None)

    def wake(self, kinds: Set[str] | None = None) -> None:
        """Jobs of these kinds were committed; None: of any kinds."""
        for wake in list(self._wakers):
            wake(kinds)


class _Loan(threading.local):
    """What a thread uses in place of the pool and of the queue's own statements; None: nothing."""

    connection: Connection | None = None
    producing: Producing | None = None
    looking: Looking | None = None


class Store:
    """One schema in one database; opens nothing before it is used. Its arguments are those of `venturi.Queue`."""

    def __init__(
        self, schema: str, *, dsn: str | None, pool_size: int, listen_dsn: str | None, notify: bool, pooler: bool
    ) -> None:
        self.schema = schema
        self.notify = notify
        self.pooler = pooler
        self.statements: Sql = Sql(schema, notify=notify)
        self.local: Wakers = Wakers()
        self._dsn = dsn
        self._listen_dsn = listen_dsn
        self._pool = Pool(dsn, pool_size, pooler)
        self._looking = Looking(self.statements)
        self._loud = Producing(self.statements)
        self._quiet = Producing(Sql(schema, notify=False))
        self._loan = _Loan()
        self._examined = self._heard = False

    @property
    def dsn(self) -> str:
        """The connection string in force."""
        return resolve(self._dsn)

    @property
    def listens(self) -> bool:
        """Whether a worker can listen."""
        return self.notify and (not self.pooler or self._listen_dsn is not None)

    @property
    def looking(self) -> Looking:
        """The operators' statements."""
        return self._loan.looking or self._looking

    def producing(self, notify: bool | None) -> Producing:
        """The producers' statements, with the doorbell or without; None: as the queue."""
        if self._loan.producing is not None:
            return self._loan.producing
        return self._loud if notify is None or notify else self._quiet

    def stats(self) -> Stats:
        """One snapshot of the queue."""
        with self.borrowed(None) as connection:
            return self.looking.stats(connection)

    def history(self, job: uuid.UUID) -> list[Entry]:
        """The newest entries of a job."""
        with self.borrowed(None) as connection:
            return self.looking.journal(connection, job, HISTORY)

    def session(self, name: str, patience: Callable[[], float]) -> Session:
        """A session of the caller's own, to a schema that is known to fit.

        Raises:
            SchemaError: The schema is missing or does not fit this version; at the first time, the role lacks
                privileges on it.
        """
        session = connect(self.dsn, name=name, pooler=self.pooler, patience=patience)
        try:
            self._examine(session)
            migrate.check(session, self.schema)
        except BaseException:
            session.close()
            raise
        return session

    def _examine(self, session: Session) -> None:
        # Once, since what is wrong later may pass, as an outage does. Whoever comes while another is at it looks too:
        # none may go on before the role is known to be good enough. No lock, which a fork could find taken.
        if self._examined:
            return
        doubts = starting.examine(session, self.schema)
        if not self._examined:
            self._examined = True
            for doubt in doubts:
                logger.warning("%s", doubt)

    def listening_session(self, patience: Callable[[], float]) -> Session:
        """A session that may listen and hold locks.

        Raises:
            ConfigError: At the first time, a pooler was seen to give it to others.
        """
        dsn = self.dsn if self._listen_dsn is None else readable("listen_dsn", self._listen_dsn)
        session = connect(dsn, name="venturi listener", patience=patience)
        try:
            if not self._heard and not own(session):
                with connect(dsn, name="venturi listener", patience=patience) as another:
                    starting.examine_listening(session, another)
            self._heard = True
        except BaseException:
            session.close()
            raise
        return session

    @contextmanager
    def lent(self, conn: Connection, statements: Sql | None = None) -> Generator[None]:
        """For the time of the block, and on this thread, use this connection where otherwise the pool is used.

        Args:
            statements: Use these too, for the sake of their clock. Default: None, the queue's.
        """
        loan, before = self._loan, vars(self._loan).copy()
        loan.connection = _checked(conn)
        loan.producing = None if statements is None else Producing(statements)
        loan.looking = None if statements is None else Looking(statements)
        try:
            yield
        finally:
            vars(loan).clear()
            vars(loan).update(before)

    @contextmanager
    def borrowed(self, conn: Connection | None) -> Generator[Connection]:
        """The caller's connection as it is, or one of the pool's for a single statement."""
        conn = self._given(conn)
        if conn is not None:
            with _turn(conn):
                yield conn
            return
        with (
            schema_errors(self.schema),
            self._pool.connection() as session,
            # Behind a pooler a transaction says for itself at which level it is.
            nullcontext() if own(session) else session.transaction(),
        ):
            yield session

    @contextmanager
    def transaction(self, conn: Connection | None, *, pipeline: bool = False) -> Generator[Connection]:
        """A transaction: the caller's, or one begun here where there is none.

        Args:
            pipeline: On a connection of the pool, let the statements up to the first answer that is read travel
                together.
        """
        conn = self._given(conn)
        if conn is not None:
            with _turn(conn):
                alone = conn.autocommit and conn.info.transaction_status == TransactionStatus.IDLE
                with conn.transaction() if alone else nullcontext():
                    yield conn
            return
        with (
            schema_errors(self.schema),
            self._pool.connection() as session,
            session.pipeline() if pipeline else nullcontext(),
            session.transaction(),
        ):
            yield session

    def _given(self, conn: Connection | None) -> Connection | None:
        return self._loan.connection if conn is None else _checked(conn)

    def migrate(self) -> list[str]:
        """Create or update the schema; the names of the migrations that were applied."""
        return migrate.migrate(self.dsn, self.schema)

    def close(self) -> None:
        """Close the pool; the next use opens it again."""
        self._pool.close()


_turns: weakref.WeakKeyDictionary[Connection, AbstractContextManager[object]] = weakref.WeakKeyDictionary()


def _turn(conn: Connection) -> AbstractContextManager[object]:
    """Threads that share a connection take turns, verb by verb: the lock of a key keeps out other sessions only."""
    return _turns.setdefault(conn, threading.RLock())


def _checked(conn: Connection) -> Connection:
    if not isinstance(conn, psycopg.Connection):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"conn must be a psycopg.Connection, not {type(conn).__name__}")
    return conn
