"""The connection of a command that looks at a queue or changes it."""

from __future__ import annotations

import argparse
import typing as t
from collections.abc import Generator
from contextlib import contextmanager

from venturi.queue import Queue
from venturi.store import migrate
from venturi.store.connections import Session, connect, resolve

__all__ = ["opened"]


@contextmanager
def opened(given: argparse.Namespace) -> Generator[tuple[Queue[t.Any], Session]]:
    """The queue that the options name, and a connection to it: tried once, so that what is wrong is told at once.

    Raises:
        ConfigError: Schema or connection string cannot be used.
        SchemaError: There is no such queue, or one of another version.
        psycopg.OperationalError: The database cannot be reached.
    """
    queue: Queue[t.Any] = Queue(given.schema, dsn=given.dsn)
    with connect(resolve(given.dsn), name="venturi command") as session:
        migrate.check(session, queue.schema)
        try:
            yield queue, session
        finally:
            queue.close()
