"""``venturi migrate``."""

from __future__ import annotations

import argparse
import sys

from venturi.queue import Queue
from venturi.store import migrate as migrations
from venturi.store.connections import resolve

__all__ = ["migrate"]


def migrate(given: argparse.Namespace) -> int:
    """Bring a queue's schema up to date, or only tell what that would do."""
    if given.status:
        return _status(given)
    if given.sql or given.sql_all:
        return _sql(given)
    for name in Queue(given.schema, dsn=given.dsn).migrate():
        print(f"applied {name}")
    print(f"schema {given.schema!r} is up to date")
    return 0


def _status(given: argparse.Namespace) -> int:
    status = migrations.status(resolve(given.dsn), given.schema)
    version = "missing" if status.version is None else f"at version {status.version}"
    print(f"schema {given.schema!r} is {version}; the newest is {status.newest}")
    for name in status.pending:
        print(f"to be applied: {name}")
    return 0


def _sql(given: argparse.Namespace) -> int:
    applied = () if given.sql_all else migrations.status(resolve(given.dsn), given.schema).applied
    script = migrations.script(given.schema, applied)
    sys.stdout.write(script)
    if not script:
        print("nothing to apply", file=sys.stderr)
    return 0
