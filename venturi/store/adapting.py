"""How values travel on any connection: as psycopg does it by default, whatever the program has made of that."""

from __future__ import annotations

import typing as t

import psycopg
from psycopg import adapt, pq
from psycopg.abc import Buffer

__all__ = ["adapters"]

NO_ENCODING = "ascii"
"""What psycopg calls SQL_ASCII, in which the server converts nothing: it writes UTF-8 then, and reads bytes."""


class _Text(adapt.Loader):
    format = pq.Format.BINARY

    def load(self, data: Buffer) -> str:
        return bytes(data).decode(errors="replace")


# psycopg's defaults as they were when this was imported: a program may change them for all its connections later.
_ADAPTERS = adapt.AdaptersMap(psycopg.adapters)
_WITHOUT_ENCODING = adapt.AdaptersMap(_ADAPTERS)
_WITHOUT_ENCODING.register_loader("text", _Text)


def adapters(connection: psycopg.Connection[t.Any]) -> adapt.AdaptersMap:
    """Reads and writes values, text among them, in every client encoding."""
    return _WITHOUT_ENCODING if connection.info.encoding == NO_ENCODING else _ADAPTERS
