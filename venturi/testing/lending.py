"""Lend a test's connection to code that opens its own."""

from __future__ import annotations

import typing as t
from collections.abc import Generator
from contextlib import contextmanager

import venturi
from venturi.queue import Queue
from venturi.store.connections import Connection

__all__ = ["chosen", "using"]


def chosen(queue: Queue[t.Any] | None) -> Queue[t.Any]:
    """The queue that an option names; None names the default queue."""
    return venturi.default if queue is None else queue


@contextmanager
def using(conn: Connection, /, *, queue: Queue[t.Any] | None = None) -> Generator[None]:
    """For the time of the block, let the verbs of a queue that are called without ``conn=`` use this connection.

    What would have been committed at once is part of the connection's transaction then. Only calls on this thread are
    meant: code under test that enqueues on threads of its own still commits.

    Args:
        conn: The test's connection.
        queue: Default: None, the default queue.
    """
    with chosen(queue).store.lent(conn):
        yield
