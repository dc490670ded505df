"""What the benchmarks of growth stand on: a server, a database for each case, jobs by the million, and counters."""

from __future__ import annotations

import argparse
import collections.abc as cabc
import contextlib
import json
import time
import typing as t

import attrs
import psycopg
from psycopg import conninfo, sql

import venturi
from venturi import embedded
from venturi.bench.settings import describe

__all__ = [
    "ANY", "CLAIM", "RECOVERY", "SCHEMA", "SETTLE", "STRANGER",
    "Cost", "Rows", "Site", "database", "drop", "fresh", "parser", "server", "show", "table",
]  # fmt: skip

SETTINGS = {
    "fsync": "on",
    "full_page_writes": "on",
    "max_connections": "200",
    "max_wal_size": "4GB",
    "shared_buffers": "512MB",
    "shared_preload_libraries": "pg_stat_statements",
}
"""Of the private server. It waits for the disk, and has room for the tables of all cases but the largest."""

SCHEMA = "venturi"
CLAIM, SETTLE, RECOVERY = "%peeked AS MATERIALIZED%", "%buried AS%", "%RECURSIVE lanes%"
ANY = f'%"{SCHEMA}".%'
"""How to tell the statements in the server's records."""

STRANGER = "00000000-0000-4000-8000-000000000000"
"""A worker that never was."""

PATIENCE = 1800.0
"""Seconds after which something has failed."""

_FILL = """
WITH numbers AS MATERIALIZED (
  SELECT n, {kinds}::text[] AS kinds, ('00000000-0000-7000-8000-' || lpad(to_hex({first} + n), 12, '0'))::uuid AS id
    FROM generate_series(0, {count} - 1) n),
bodies AS (
  INSERT INTO {q}.jobs (id, kind, payload, priority, created_at)
  SELECT id, kinds[1 + n % cardinality(kinds)], jsonb_build_object('i', n), 1, statement_timestamp() FROM numbers)
INSERT INTO {q}.live (id, kind, priority, visible_at, owner, lease_until, run_count)
SELECT id, kinds[1 + n % cardinality(kinds)], 1,
       statement_timestamp() + {start}::interval + n * interval '1 microsecond',
       {owner}::uuid, CASE WHEN {owner} IS NOT NULL THEN statement_timestamp() + interval '1 day' END,
       CASE WHEN {owner} IS NULL THEN 0 ELSE 1 END
  FROM numbers"""

_RETAIN = """
WITH numbers AS MATERIALIZED (
  SELECT n, ('00000000-0000-7000-8000-' || lpad(to_hex({first} + n), 12, '0'))::uuid AS id,
         statement_timestamp() - {age}::interval + n * {age}::interval / {count} AS at
    FROM generate_series(0, {count} - 1) n),
bodies AS (
  INSERT INTO {q}.jobs (id, kind, payload, priority, created_at)
  SELECT id, {kind}, jsonb_build_object('i', n), 1, at FROM numbers)
INSERT INTO {q}.journal (job_id, run_no, failure_count, recorded_at, outcome, kind, worker, duration)
SELECT id, 1, 0, at, 0, {kind}, {owner}::uuid, interval '1 ms' FROM numbers"""

_COST = """
SELECT coalesce(sum(calls), 0)::bigint, coalesce(sum(total_exec_time), 0)::float8,
       coalesce(max(max_exec_time), 0)::float8, coalesce(sum(shared_blks_hit + shared_blks_read), 0)::bigint,
       coalesce(sum(wal_bytes), 0)::bigint
  FROM pg_stat_statements
 WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database()) AND query LIKE %s"""

_ROWS = """
SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0)), sum(n_tup_ins + n_tup_upd + n_tup_del),
       sum(n_tup_upd), sum(n_tup_hot_upd),
       (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes WHERE schemaname = %s)
  FROM pg_stat_user_tables WHERE schemaname = %s"""


@attrs.frozen
class Cost:
    """What the server spent on a kind of statement.

    Attributes:
        milliseconds: In all.
        longest: Milliseconds of the longest one.
        buffers: Shared buffers, found there or read.
    """

    calls: int
    milliseconds: float
    longest: float
    buffers: int
    wal: int

    @property
    def mean(self) -> float:
        """Milliseconds of one."""
        return self.milliseconds / max(1, self.calls)


@attrs.frozen
class Rows:
    """The server's counters of the queue's tables.

    Attributes:
        read: Rows that scans fetched from tables.
        entries: Entries that scans read from indexes, dead ones included.
        written: Rows inserted, updated and deleted.
    """

    read: int
    written: int
    updated: int
    hot: int
    entries: int

    def __sub__(self, other: Rows) -> Rows:
        mine, others = attrs.astuple(self), attrs.astuple(other)
        return Rows(*(one - two for one, two in zip(mine, others, strict=True)))


class Site:
    """One migrated queue in a database of its own, seen from a session beside its worker's.

    Args:
        dsn: Of that database.
    """

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.queue: venturi.Queue = venturi.Queue(SCHEMA, dsn=dsn)
        self.queue.migrate()
        self._session = psycopg.connect(dsn, autocommit=True)
        self.ask("CREATE EXTENSION pg_stat_statements")
        self._first = 0

    def close(self) -> None:
        """Leave no session behind."""
        self.queue.close()
        self._session.close()

    def ask(self, text: t.LiteralString, *parameters: object, **names: sql.Composable) -> list[tuple[t.Any, ...]]:
        """The rows that a statement answers; ``{q}`` is the schema."""
        statement = sql.SQL(text).format(q=sql.Identifier(SCHEMA), **names)
        cursor = self._session.execute(statement, parameters or None)
        return cursor.fetchall() if cursor.description else []

    def one(self, text: t.LiteralString, *parameters: object, **names: sql.Composable) -> t.Any:
        """The only value that a statement answers."""
        return self.ask(text, *parameters, **names)[0][0]

    # --- Rows by the million

    def fill(self, count: int, *kinds: str, start: str = "-1 hour", owner: str | None = None) -> None:
        """Insert unfinished jobs, evenly of each kind, due a microsecond apart.

        Args:
            start: When the first is due, from now.
            owner: The worker that holds them. Default: None, they are pending.
        """
        values = {"kinds": list(kinds), "count": count, "first": self._first, "start": start, "owner": owner}
        self.ask(_FILL, **{name: sql.Literal(value) for name, value in values.items()})
        self._first += count

    def retain(self, count: int, kind: str, age: str = "60 days") -> None:
        """Insert completed jobs with their journal entries, spread evenly over the time since ``age``."""
        values = {"kind": kind, "count": count, "first": self._first, "age": age, "owner": STRANGER}
        self.ask(_RETAIN, **{name: sql.Literal(value) for name, value in values.items()})
        self._first += count

    def ready(self) -> None:
        """Leave the tables as a queue that has stood for a while has them, and nothing for later to be written."""
        self.ask("VACUUM ANALYZE")
        self.ask("CHECKPOINT")

    # --- Counters

    def entries(self) -> int:
        """Entries ever written to the journal, at no cost."""
        return t.cast(
            int, self.one("SELECT coalesce(pg_sequence_last_value(%s::regclass), 0)", f"{SCHEMA}.journal_id_seq")
        )

    def forget(self) -> None:
        """Count the costs from here."""
        self.ask("""SELECT pg_stat_statements_reset(0, oid, 0) FROM pg_database WHERE datname = current_database()""")

    def cost(self, like: str = ANY) -> Cost:
        """What statements like this have cost."""
        return Cost(*self.ask(_COST, like)[0])

    def rows(self) -> Rows:
        """The tables' counters; complete only when no other session is left."""
        self.ask("SELECT pg_stat_force_next_flush(), pg_stat_clear_snapshot()")
        return Rows(*map(int, self.ask(_ROWS, SCHEMA, SCHEMA)[0]))

    def position(self) -> int:
        """Bytes of write-ahead log ever written by the server."""
        return int(self.one("SELECT pg_current_wal_lsn() - '0/0'"))

    def sessions(self) -> int:
        """Sessions of venturi's in this database."""
        rows = self.ask("""SELECT pid FROM pg_stat_activity
                            WHERE datname = current_database() AND application_name LIKE 'venturi %'""")
        return len(rows)

    def until(
        self, reached: cabc.Callable[[], bool], what: str, timeout: float = PATIENCE, every: float = 0.02
    ) -> None:
        """Wait until something is so.

        Raises:
            SystemExit: It took longer than ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while not reached():
            if time.monotonic() > deadline:
                raise SystemExit(f"waited {timeout:.0f} s in vain until {what}")
            time.sleep(every)


@contextlib.contextmanager
def server(dsn: str | None, **settings: str) -> cabc.Generator[str]:
    """The connection string of the server given, or of a private one; its settings are printed."""
    with contextlib.ExitStack() as stack:
        found = dsn or stack.enter_context(embedded.server(settings={**SETTINGS, **settings})).dsn
        with psycopg.connect(found, autocommit=True) as connection:
            show({"settings": describe(connection)})
        yield found


@contextlib.contextmanager
def database(admin: str, name: str = "bench_growth") -> cabc.Generator[Site]:
    """A queue in a fresh database of that name, which is dropped in the end."""

    try:
        with contextlib.closing(Site(fresh(admin, name))) as site:
            yield site
    finally:
        drop(admin, name)


def fresh(admin: str, name: str) -> str:
    """An empty database of that name; its connection string."""
    drop(admin, name)
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    return conninfo.make_conninfo(admin, dbname=name)


def drop(admin: str, name: str) -> None:
    """Drop the database of that name, if there is one, whoever uses it."""
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


def parser(name: str, description: str | None, *, dsn: bool = True) -> argparse.ArgumentParser:
    """A parser with the options that these benchmarks share."""
    made = argparse.ArgumentParser(
        prog=f"python -m tests.benchmarks {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if dsn:
        made.add_argument(
            "--dsn", help="a superuser's, of a server with pg_stat_statements preloaded; default: a private server"
        )
    made.add_argument("--scale", type=float, default=1.0, help="share of all sizes; default: 1")
    made.add_argument("--concurrency", type=int, default=20, help="slots of one worker; default: 20")
    return made


def show(row: cabc.Mapping[str, object]) -> None:
    """Print one JSON line."""
    print(json.dumps(row, default=str), flush=True)


def table(rows: cabc.Sequence[cabc.Mapping[str, object]], *columns: str) -> None:
    """Print the rows as one Markdown table, with the columns named, or else with those of all rows together."""
    names = columns or tuple(dict.fromkeys(name for row in rows for name in row))
    lines = [[str(row.get(name, "")) for name in names] for row in rows]
    print()
    for line in (names, ["---"] * len(names), *lines):
        print(f"| {' | '.join(line)} |", flush=True)
