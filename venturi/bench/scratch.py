"""A queue of the benchmark's own, gone afterwards whatever happens."""

from __future__ import annotations

import secrets
import typing as t
from collections.abc import Callable, Generator
from contextlib import contextmanager

import attrs
from psycopg import sql

from venturi.queue import Queue
from venturi.store.connections import Rows, Session, connect, resolve, run

__all__ = ["Scratch", "scratch"]

# A plain table beside the queue's, for what is compared with.
_BARE = "CREATE TABLE {q}.bare (id bigint PRIMARY KEY, payload jsonb NOT NULL, taken boolean NOT NULL DEFAULT false)"


@attrs.frozen
class Scratch:
    """The queue, and a connection beside it in autocommit mode."""

    queue: Queue
    connection: Session

    def run(self, statement: t.LiteralString, *parameters: object) -> Rows:
        """Run a statement in which ``{q}`` is the schema."""
        text = sql.SQL(statement).format(q=sql.Identifier(self.queue.schema))
        return run(self.connection, text.as_bytes(self.connection), parameters)

    def another(self) -> Session:
        """One more connection, to be closed by the caller."""
        return connect(self.queue.store.dsn, name="venturi bench")

    def empty(self) -> None:
        """Take out all jobs and their history."""
        self.run("TRUNCATE {q}.jobs, {q}.live, {q}.journal, {q}.bare")


@contextmanager
def scratch(dsn: str | None, tell: Callable[[str], None]) -> Generator[Scratch]:
    """A new queue in a schema with a name that nobody else has; it is dropped when the block ends, in whatever way.

    Raises:
        ConfigError: The connection string cannot be used.
        psycopg.Error: The database cannot be reached, or the role may not create schemas.
    """
    queue: Queue = Queue(f"venturi_bench_{secrets.token_hex(6)}", dsn=dsn)
    with connect(resolve(dsn), name="venturi bench") as connection:
        made = Scratch(queue, connection)
        tell(f"works in the schema {queue.schema}, and drops it at the end")
        try:
            queue.migrate()
            made.run(_BARE)
            yield made
        finally:
            queue.close()
            _drop(made)
            tell(f"dropped the schema {queue.schema}")


def _drop(made: Scratch) -> None:
    # The connection may have been interrupted in the middle of something.
    with made.another() as connection:
        Scratch(made.queue, connection).run("DROP SCHEMA IF EXISTS {q} CASCADE")
