"""Large batches: the rows of ``live`` by one INSERT, and while the database is at it, those of ``jobs`` are made for a
COPY in its binary format, in which neither side spends time on printing and reading.

A row is the number of its fields, and for each field its length in bytes and its bytes; a length of -1 is NULL. Numbers
are big-endian; a time is in microseconds since the year 2000; a jsonb is a version byte and its text (PostgreSQL
documentation, COPY, "Binary Format", and the ``_recv`` functions of the types).
"""

from __future__ import annotations

import datetime as dt
import functools
import struct
import typing as t
import uuid
from collections.abc import Iterator, Sequence

from venturi.store import sql
from venturi.store.adapting import encoding
from venturi.store.connections import Connection, Rows, array, run, texts
from venturi.values import Receipt

__all__ = ["Plain", "copy"]


class Plain(t.Protocol):
    """A job without key and carry."""

    @property
    def kind(self) -> str: ...
    @property
    def payload(self) -> str: ...
    @property
    def priority(self) -> int: ...
    @property
    def trace(self) -> str | None: ...


_BEGIN = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_END = struct.pack("!h", -1)
_NULL = struct.pack("!i", -1)
_SIX = struct.pack("!hi", 6, 16)  # the number of fields, and the length of the id
_LENGTH = struct.Struct("!i").pack
_PRIORITY = struct.Struct("!ih").pack
_TIME = struct.Struct("!iq").pack

_EPOCH = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)
_MICROSECOND = dt.timedelta(microseconds=1)


def copy(
    connection: Connection,
    statements: sql.Sql,
    jobs: Sequence[Plain],
    ids: Sequence[int],
    created_at: dt.datetime,
    due: dt.datetime,
) -> list[Receipt]:
    """Insert jobs that are due a microsecond after each other, the first of them at ``due``; their receipts.

    Args:
        connection: Not in pipeline mode.
        ids: As numbers.
        created_at: When all of them were enqueued.
    """
    keys = array(f"{id_:032x}" for id_ in ids)
    lanes = (due, keys, texts([job.kind for job in jobs]), array(int(job.priority) for job in jobs))
    with connection.pipeline():
        run(connection, statements(sql.APPEND_LIVE), lanes)
        receipts = [Receipt(uuid.UUID(int=id_), "inserted") for id_ in ids]
        bodies = b"".join(_bodies(jobs, receipts, encoding(connection), created_at))
    # COPY takes no parameters, so that its percent signs stand for themselves.
    with Rows(connection).copy(statements(sql.COPY_JOBS).replace(b"%%", b"%")) as target:
        target.write(_BEGIN + bodies + _END)
    return receipts


def _bodies(
    jobs: Sequence[Plain], receipts: Sequence[Receipt], encoding: str, created_at: dt.datetime
) -> Iterator[bytes]:
    # Of the text fields only the kind is not plain ASCII.
    created = _TIME(8, (created_at - _EPOCH) // _MICROSECOND)

    @functools.cache
    def kind(name: str) -> bytes:
        return _field(name.encode(encoding))

    @functools.cache
    def tail(priority: int, trace: str | None) -> bytes:
        return _PRIORITY(2, priority) + (_NULL if trace is None else _field(b"\1" + trace.encode())) + created

    for job, receipt in zip(jobs, receipts, strict=True):
        payload = job.payload.encode()
        head = _SIX + receipt.id.bytes + kind(job.kind)
        yield b"".join((head, _LENGTH(len(payload) + 1), b"\1", payload, tail(job.priority, job.trace)))


def _field(content: bytes) -> bytes:
    return _LENGTH(len(content)) + content
