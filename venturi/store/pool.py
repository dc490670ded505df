"""The producers' connections: a pool that is opened at need, and never carried over a fork."""

from __future__ import annotations

import atexit
import os
import select
import threading
import time
import typing as t
import weakref
from collections.abc import Generator
from contextlib import contextmanager

import psycopg

from venturi.store.connections import Session, parameters, prepare_session, resolve

if t.TYPE_CHECKING:
    from psycopg_pool import ConnectionPool

__all__ = ["POOL_SECONDS", "Pool"]

POOL_SECONDS = 10.0

_opening = threading.Lock()


def _renew_opening() -> None:
    global _opening
    _opening = threading.Lock()


os.register_at_fork(after_in_child=_renew_opening)  # another thread may have held it, and is not there to let go


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


# Later, when Python takes its objects down, a pool waits in vain for its threads: they are stopped already.
@atexit.register
def _close_all() -> None:
    for pool in list(_pools):
        pool.close()


class Pool:
    """The producers' connections: opened at need, checked before use, and never carried over a fork.

    Args:
        dsn: Where to; resolved at the first use.
        size: Most connections at once.
        pooler: Whether a transaction pooler stands between.
    """

    def __init__(self, dsn: str | None, size: int, pooler: bool) -> None:
        self._dsn = dsn
        self._size = size
        self._pooler = pooler
        self._pool: ConnectionPool[Session] | None = None
        self._pid = 0
        self._refusal: psycopg.Error | None = None
        # A pool inherited over a fork belongs to the parent: it is neither used nor closed here, only kept from being
        # collected.
        self._inherited: list[object] = []
        _pools.add(self)

    @contextmanager
    def connection(self) -> Generator[Session]:
        """A connection in autocommit mode, for the time of the block.

        Raises:
            psycopg.OperationalError: None could be had within 10 s: all are in use, or none could be opened, which is
                then the cause.
        """
        pool = self._open()
        try:
            session = _living(pool)
        except psycopg.OperationalError as error:
            if (refusal := self._refusal) is None:
                raise
            raise type(error)(f"{error}: {refusal}") from refusal
        try:
            yield session
        except (psycopg.OperationalError, psycopg.InternalError):
            # InternalError: after a failover the server may have become read-only.
            session.close()
            raise
        finally:
            pool.putconn(session)

    def close(self) -> None:
        """Close the connections; the next use opens new ones."""
        with _opening:
            pool, self._pool = self._pool, None
            if pool is not None and self._pid != os.getpid():
                self._inherited.append(pool)
                return
        if pool is not None:
            pool.close()

    def _open(self) -> ConnectionPool[Session]:
        if self._pool is not None and self._pid == os.getpid():
            return self._pool
        from psycopg_pool import ConnectionPool

        with _opening:
            if self._pool is not None and self._pid != os.getpid():
                self._inherited.append(self._pool)
                self._pool = None
            if self._pool is None:
                dsn = resolve(self._dsn)
                self._pid = os.getpid()
                self._pool = ConnectionPool(
                    dsn,
                    connection_class=self._reporting(),
                    kwargs={
                        "autocommit": True,
                        "prepare_threshold": None if self._pooler else 5,
                        **parameters(dsn, "venturi producer"),
                    },
                    min_size=0,
                    max_size=self._size,
                    open=True,
                    name="venturi",
                    timeout=POOL_SECONDS,
                    # Its waits between attempts double until it gives up and the next user begins anew: given its
                    # default of five minutes, a long outage would go on for nearly as long again.
                    reconnect_timeout=POOL_SECONDS,
                    max_idle=300,
                    configure=lambda session: prepare_session(session, self._pooler),
                )
            return self._pool

    def _reporting(self) -> type[Session]:
        """Sessions whose latest refusal is kept here: the pool only says that time was up."""
        pool = self

        class Reporting(Session):
            @classmethod
            def connect(cls, conninfo: str = "", **options: t.Any) -> t.Self:
                try:
                    session = super().connect(conninfo, **options)
                except psycopg.Error as error:
                    pool._refusal = error
                    raise
                pool._refusal = None
                return session

        return Reporting


def _living(pool: ConnectionPool[Session]) -> Session:
    """A session of the pool that the server has not closed."""
    # Not the pool's own check, which pauses after each session it refuses, longer every time: a full pool would take
    # more than its whole patience to recover from a restart.
    deadline = time.monotonic() + POOL_SECONDS
    while True:
        session = pool.getconn(deadline - time.monotonic())
        if not _has_spoken(session):
            return session
        session.close()
        pool.putconn(session)


def _has_spoken(session: Session) -> bool:
    """Whether the server has closed an idle session: it has nothing to say, unless it says goodbye. No round trip."""
    poll = select.poll()
    poll.register(session.fileno(), select.POLLIN)
    return bool(poll.poll(0))
