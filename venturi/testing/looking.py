"""Look at what is queued, as values to compare."""

from __future__ import annotations

import typing as t

import attrs
from typing_extensions import TypeVar

from venturi import codec
from venturi.queue import Queue
from venturi.store.connections import Connection, run, schema_errors
from venturi.store.looking_sql import PENDING
from venturi.task import task_type
from venturi.testing.lending import chosen

__all__ = ["assert_enqueued", "queued"]

T = TypeVar("T")


@t.overload
def queued(conn: Connection, cls: type[T], /, *, queue: Queue[t.Any] | None = None) -> list[T]: ...
@t.overload
def queued(conn: Connection, /, *, queue: Queue[t.Any] | None = None) -> list[t.Any]: ...
def queued(conn: Connection, cls: type[t.Any] | None = None, /, *, queue: Queue[t.Any] | None = None) -> list[t.Any]:
    """The pending tasks that this transaction sees, as values: by priority, then by when they are due.

    Jobs that are due later, have paused, or wait for a retry are pending too.

    Args:
        conn: The test's connection.
        cls: Only tasks of this class. Default: None, all.
        queue: Default: None, the default queue.

    Raises:
        PayloadError: A payload cannot be decoded.
        UnknownKindError: No class was given, and the queue has met none for the kind of a job.
        SchemaError: The queue was never migrated.
        TypeError: ``cls`` is no task class.
    """
    chosen_queue = chosen(queue)
    type_ = None if cls is None else task_type(cls)
    kinds = None if type_ is None else list(type_.kinds)
    with schema_errors(chosen_queue.schema):
        rows = run(conn, chosen_queue.store.statements(PENDING), (kinds, kinds)).fetchall()
    find = chosen_queue.registry.task
    return [codec.decode(payload, (type_ or find(kind)).cls) for kind, payload in rows]


def assert_enqueued(conn: Connection, cls: type[T], /, *, queue: Queue[t.Any] | None = None, **fields: object) -> T:
    """Assert that a task of this class is pending, and give the first one.

    Args:
        conn: The test's connection.
        cls: The task class.
        queue: Default: None, the default queue. (A field of this name can be compared with `queued` only.)
        fields: Values that its fields must have; the other fields may have any.

    Raises:
        AssertionError: There is none; the message shows the pending ones.
        TypeError: The class is no task, or has no such field.
    """
    __tracebackhide__ = True
    found = queued(conn, cls, queue=queue)
    unknown = fields.keys() - {field.name for field in attrs.fields(task_type(cls).cls)}
    if unknown:
        raise TypeError(f"{cls.__qualname__} has no field {sorted(unknown)[0]!r}")
    for task in found:
        if all(getattr(task, name) == value for name, value in fields.items()):
            return task
    wanted = ", ".join(f"{name}={value!r}" for name, value in fields.items())
    there = "".join(f"\n  {task!r}" for task in found) or " none"
    raise AssertionError(f"no pending {cls.__qualname__}({wanted}); pending of this class:{there}")
