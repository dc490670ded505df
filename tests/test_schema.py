"""What the tables need of a server, and what a server needs of them."""

from __future__ import annotations

import collections.abc as cabc
import datetime as dt
import typing as t
import uuid

import psycopg
import pytest
from fixtures.sqltext import on
from fixtures.work import ended, until, working

import venturi

Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[t.Any]]


@venturi.task("publish")
class Published:
    end: str = "complete"
    key: str | None = None

    def dedup_key(self) -> str | None:
        return self.key


def test_every_table_has_a_primary_key_and_none_a_foreign_key(schema: str, connect: Connect) -> None:
    """Any of them can be replicated, and no deletion looks into another table (cases 153, 162)."""
    query = """
        SELECT r.relname, coalesce(array_agg(c.contype::text ORDER BY c.contype)
                                   FILTER (WHERE c.contype IN ('p', 'f')), '{}')
          FROM pg_class r LEFT JOIN pg_constraint c ON c.conrelid = r.oid
         WHERE r.relnamespace = %s::regnamespace AND r.relkind IN ('r', 'p') GROUP BY r.relname"""
    with connect() as connection:
        found = dict(connection.execute(query, [f'"{schema}"']).fetchall())
    assert {"jobs", "live", "journal", "dead", "workers", "cancels"} <= found.keys()
    assert {tuple(kinds) for kinds in found.values()} == {("p",)}


def test_no_extension_is_needed(schema: str, connect: Connect) -> None:
    """Nothing of a queue depends on one, nor on a language or a type that is not PostgreSQL's own (case 152)."""
    query = """
        SELECT r.relname, d.refobjid
          FROM pg_class r JOIN pg_depend d ON d.objid = r.oid AND d.classid = 'pg_class'::regclass
         WHERE r.relnamespace = %s::regnamespace AND d.refclassid = 'pg_extension'::regclass"""
    with connect() as connection:
        assert connection.execute(query, [f'"{schema}"']).fetchall() == []
        assert connection.execute("SELECT extname FROM pg_extension").fetchall() == [("plpgsql",)]
        functions = "SELECT proname FROM pg_proc WHERE pronamespace = %s::regnamespace"
        assert connection.execute(functions, [f'"{schema}"']).fetchall() == []


@pytest.mark.filterwarnings("ignore")
def test_a_queue_whose_tables_are_published_works(queue: venturi.Queue, connect: Connect) -> None:
    """A publication refuses changes of rows that it cannot identify, and there are none (case 153)."""
    name = f"published_{uuid.uuid4().hex[:8]}"

    @queue.handler
    def handle(task: Published, ctx: venturi.Context) -> venturi.Outcome:
        match task.end:
            case "pause":
                return venturi.Pause() if ctx.run_count == 1 else None
            case "fail":
                raise RuntimeError("again")
            case "die":
                raise venturi.PermanentError("never")
            case _:
                return None

    with connect(autocommit=True) as connection:
        connection.execute("SET client_min_messages = error")  # of a server whose wal_level is not logical
        connection.execute(on(queue.schema, "CREATE PUBLICATION {name} FOR TABLES IN SCHEMA {schema}", name=name))
        try:
            merged = queue.enqueue(Published(key="k")).id
            assert queue.enqueue(Published(key="k")).id == merged
            pausing, failing, dying = (
                receipt.id for receipt in queue.enqueue_many([Published("pause"), Published("fail"), Published("die")])
            )
            with working(queue):
                ended(queue, merged)
                ended(queue, pausing)
                until(queue, failing, "retried")
                ended(queue, dying, "dead")
            assert queue.cancel(failing)
            assert queue.requeue(dying)
            assert queue.cancel(dying)
            assert queue.migrate() == []
            assert queue.cleanup(finished_before=dt.datetime.now(dt.UTC) + dt.timedelta(hours=1)) == 4
        finally:
            connection.execute(on(queue.schema, "DROP PUBLICATION {name}", name=name))
