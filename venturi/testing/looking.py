"""Look at what is queued, as values to compare."""

from __future__ import annotations

import typing as t

from typing_extensions import TypeVar

from venturi import codec
from venturi.queue import Queue
from venturi.store.connections import Connection, run
from venturi.store.sql import PENDING
from venturi.task import task_type

__all__ = ["assert_enqueued", "queued"]

T = TypeVar("T")


@t.overload
def queued(conn: Connection, cls: type[T], /, *, queue: Queue[t.Any] | None = None) -> list[T]: ...
@t.overload
def queued(conn: Connection, /, *, queue: Queue[t.Any] | None = None) -> list[t.Any]: ...
def queued(conn: Connection, cls: type[t.Any] | None = None, /, *, queue: Queue[t.Any] | None = None) -> list[t.Any]:
    """The pending tasks that this transaction sees, as values, in the order in which they are due.

    Args:
        conn: The test's connection.
        cls: Only tasks of this class. Default: None, of every class that the queue knows.
        queue: Default: None, the default queue.

    Raises:
        PayloadError: A payload cannot be decoded.
        UnknownKindError: A job is of a kind whose task class the queue has not met.
    """
    if queue is None:
        from venturi import default

        queue = default
    if cls is not None:
        queue.registry.know(task_type(cls))
    kinds = None if cls is None else list(task_type(cls).kinds)
    rows = run(conn, queue.store.statements(PENDING), (kinds, kinds)).fetchall()
    return [codec.decode(payload, queue.registry.task(kind).cls) for kind, payload in rows]


def assert_enqueued(conn: Connection, cls: type[T], /, *, queue: Queue[t.Any] | None = None, **fields: object) -> T:
    """Assert that a task of this class is pending, and give the first one.

    Args:
        conn: The test's connection.
        cls: The task class.
        queue: Default: None, the default queue.
        fields: Values that its fields must have; the other fields may have any.

    Raises:
        AssertionError: There is none; the message shows the pending ones.
    """
    found = queued(conn, cls, queue=queue)
    for task in found:
        if all(getattr(task, name) == value for name, value in fields.items()):
            return task
    wanted = ", ".join(f"{name}={value!r}" for name, value in fields.items())
    there = "".join(f"\n  {task!r}" for task in found) or " none"
    raise AssertionError(f"no pending {cls.__qualname__}({wanted}); pending of this class:{there}")
