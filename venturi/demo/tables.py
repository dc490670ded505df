"""The tables of the demo itself: what it knows of the folder. The jobs are in the queue's schema, beside them."""

from __future__ import annotations

import pathlib
import typing as t
import uuid

import attrs
import psycopg
from psycopg.types.json import Jsonb

from venturi.demo.display import shown
from venturi.demo.source import Contents

__all__ = [
    "Connection",
    "Index",
    "add_files",
    "add_report",
    "begin",
    "create",
    "drop",
    "failures",
    "index",
    "place",
    "store",
    "summary",
]

Connection: t.TypeAlias = psycopg.Connection[tuple[t.Any, ...]]

# A path may be longer than what an index takes, its digest is not.
_CREATE = """
CREATE SCHEMA venturi_demo_index;
CREATE TABLE venturi_demo_index.folder (
  path         bytea NOT NULL,
  walk         uuid NOT NULL,
  report       text,
  finished_at  timestamptz
);
CREATE TABLE venturi_demo_index.files (
  path         bytea NOT NULL,
  lines        int,
  functions    jsonb,
  identifiers  jsonb
);
CREATE UNIQUE INDEX ON venturi_demo_index.files (sha256(path));
"""


@attrs.frozen
class Index:
    """How far the index of a folder is.

    Attributes:
        walk: The job that finds the files.
        found: Files found so far; ``done`` of them are indexed.
        report: The report; None while it is not complete.
        age: How long it has been complete, in words.
    """

    folder: bytes
    walk: uuid.UUID
    report: str | None
    age: str | None
    found: int
    done: int


def drop(conn: Connection) -> None:
    """Drop what an earlier demo has left, its queue included."""
    conn.execute("DROP SCHEMA IF EXISTS venturi_demo, venturi_demo_index CASCADE")


def create(conn: Connection) -> None:
    """Make the tables."""
    conn.execute(_CREATE)


def index(conn: Connection) -> Index | None:
    """The index as it stands; None when there is none."""
    if conn.execute("SELECT to_regclass('venturi_demo_index.folder')").fetchone() == (None,):
        return None
    row = conn.execute(
        "SELECT path, walk, report, date_trunc('second', now() - finished_at)::text, found, done"
        "  FROM venturi_demo_index.folder,"
        "       (SELECT count(*) AS found, count(lines) AS done FROM venturi_demo_index.files) f"
    ).fetchone()
    return None if row is None else Index(*row)


def begin(conn: Connection, folder: bytes, walk: uuid.UUID) -> None:
    """Note which folder is indexed, and the job that walks through it."""
    conn.execute("INSERT INTO venturi_demo_index.folder (path, walk) VALUES (%s, %s)", [folder, walk])


def add_files(conn: Connection, paths: list[bytes]) -> list[bytes]:
    """Note files that were found; gives those that are new."""
    rows = conn.execute(
        "INSERT INTO venturi_demo_index.files (path) SELECT unnest(%s::bytea[])"
        "    ON CONFLICT (sha256(path)) DO NOTHING RETURNING path",
        [paths],
    )
    return [path for (path,) in rows]


def store(conn: Connection, path: bytes, found: Contents) -> bool:
    """Store what is in a file; False when an earlier run has done it."""
    stored = conn.execute(
        "UPDATE venturi_demo_index.files SET lines = %s, functions = %s, identifiers = %s"
        " WHERE sha256(path) = sha256(%s) AND lines IS NULL",
        [found.lines, Jsonb(found.functions), Jsonb(found.identifiers), path],
    )
    return stored.rowcount == 1


def add_report(conn: Connection, report: str) -> None:
    """Store the report, which completes the index."""
    conn.execute("UPDATE venturi_demo_index.folder SET report = %s, finished_at = now()", [report])


def place(conn: Connection, *, private: bool) -> str:
    """Where the demo leaves what it has made, in words: the folder of the private server, or schemas."""
    if not private:
        return "the schemas venturi_demo and venturi_demo_index of this database"
    ((data,),) = conn.execute("SHOW data_directory").fetchall()
    return f"{pathlib.Path(data).parent}, the folder of the private server"


def summary(conn: Connection) -> str:
    """The index in a few lines."""
    ((files, lines, functions),) = conn.execute(
        "SELECT count(lines), coalesce(sum(lines), 0), coalesce(sum(jsonb_array_length(functions)), 0)"
        "  FROM venturi_demo_index.files"
    ).fetchall()
    names = conn.execute(
        "SELECT key, sum(value::int) AS uses FROM venturi_demo_index.files, jsonb_each_text(identifiers)"
        " GROUP BY key ORDER BY uses DESC, key LIMIT 10"
    ).fetchall()
    largest = conn.execute(
        "SELECT (f->>1)::int AS size, f->>0, path FROM venturi_demo_index.files, jsonb_array_elements(functions) f"
        " ORDER BY size DESC, path LIMIT 5"
    ).fetchall()
    return "\n".join(
        [
            f"{files:,} files, {lines:,} lines, {functions:,} functions",
            "Most used names:   " + (", ".join(f"{name} {uses:,}" for name, uses in names) or "none"),
            "Longest functions: " + ("" if largest else "none"),
            *(f"  {size:>5} lines  {name}  in {shown(path)}" for size, name, path in largest),
        ]
    )


def failures(conn: Connection, *outcomes: str) -> list[tuple[str, str]]:
    """File and reason of every run that ended so. The queue's views are there to be read, and joined."""
    rows = conn.execute(
        "SELECT coalesce(evidence->>'file', 'job ' || job_id), coalesce(note, '') FROM venturi_demo.all_entries"
        " WHERE outcome = ANY(%s) ORDER BY id",
        [list(outcomes)],
    )
    return [(file, reason) for file, reason in rows]
