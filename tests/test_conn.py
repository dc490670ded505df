"""Enqueue in the caller's transaction: on any connection, and never more than the caller asked for."""

from __future__ import annotations

import collections.abc as cabc
import datetime as dt
import functools
import json
import typing as t
import uuid
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from psycopg import rows, sql
from psycopg.pq import TransactionStatus
from psycopg.types.json import set_json_dumps, set_json_loads
from psycopg.types.string import TextLoader

import venturi

Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[t.Any]]

MINUTES = dt.timedelta(minutes=5)


@venturi.task("plain")
class Plain:
    text: str = ""


@venturi.task("keyed", carry=dict)
class Keyed:
    key: str
    number: int = 0

    def dedup_key(self) -> str:
        return self.key

    def merge(self, existing: venturi.Pending[Keyed, dict[str, int]]) -> venturi.Merge[Keyed]:
        if self.number < 0:
            raise LookupError("no merge")
        seen = len(existing.history)
        return venturi.Combine(Keyed(self.key, existing.task.number + self.number), carry={"seen": seen})


class Odd(t.NamedTuple):
    """What a row factory of the caller's may make of a row."""

    values: tuple[t.Any, ...]


def odd_rows(cursor: psycopg.Cursor[t.Any]) -> cabc.Callable[[cabc.Sequence[t.Any]], Odd]:
    return lambda values: Odd(tuple(values))


FACTORIES: dict[str, dict[str, t.Any]] = {
    "dict rows": {"row_factory": rows.dict_row},
    "named tuples": {"row_factory": rows.namedtuple_row},
    "scalars": {"row_factory": rows.scalar_row},
    "keywords": {"row_factory": rows.kwargs_row(dict)},
    "arguments": {"row_factory": rows.args_row(lambda *values: list(values))},
    "a row class": {"row_factory": odd_rows},
    "client cursors": {"cursor_factory": psycopg.ClientCursor},
    "raw cursors": {"cursor_factory": psycopg.RawCursor},
    "dict rows in autocommit": {"row_factory": rows.dict_row, "autocommit": True},
    "no prepared statements": {"prepare_threshold": None},
    "prepared at once": {"prepare_threshold": 0},
}


@pytest.fixture
def schema(emptied: str) -> str:
    """One schema for all tests here, emptied after each."""
    return emptied


@pytest.mark.conformance(51, 60)
@pytest.mark.parametrize("options", FACTORIES.values(), ids=FACTORIES)
def test_every_verb_works_on_any_connection_and_leaves_it_as_it_was(
    queue: venturi.Queue, connect: Connect, options: dict[str, t.Any]
) -> None:
    """Row factory, cursor class and autocommit are the caller's: the library neither minds nor changes them.

    Cases 039, 041.
    """
    caller = connect(**options)
    before = _settings(caller)
    _every_verb(queue, caller)
    assert _settings(caller) == before
    expected = TransactionStatus.IDLE if caller.autocommit else TransactionStatus.INTRANS
    assert caller.info.transaction_status == expected
    caller.commit()
    assert len(queue.jobs()) == 6


@pytest.mark.conformance(51)
def test_adapters_of_the_caller_change_nothing(queue: venturi.Queue, connect: Connect) -> None:
    """JSON functions and loaders that the caller registered are not used for the queue's own values (case 041)."""
    caller = connect()
    set_json_loads(lambda data: ("loaded", data), caller)
    set_json_dumps(lambda value: json.dumps([value]), caller)
    for name in ("uuid", "text", "timestamptz", "int8", "jsonb", "bool"):
        caller.adapters.register_loader(name, Backwards)
    _every_verb(queue, caller)


@pytest.mark.conformance(51)
def test_adapters_that_the_program_registered_globally_change_nothing(queue: venturi.Queue, connect: Connect) -> None:
    """A program may load uuids or timestamps as text everywhere; the queue's receipts stay what they are (case 041)."""
    before = {oid: psycopg.adapters.get_loader(oid, psycopg.pq.Format.TEXT) for oid in (2950, 1184, 20)}
    try:
        for oid in before:
            psycopg.adapters.register_loader(oid, Backwards)
        caller = connect()
        _every_verb(queue, caller)
    finally:
        for oid, loader in before.items():
            assert loader is not None
            psycopg.adapters.register_loader(oid, loader)


class Backwards(TextLoader):
    """Reads every text from behind."""

    def load(self, data: t.Any) -> str:
        return bytes(data).decode()[::-1]


SESSIONS: dict[str, t.LiteralString] = {
    "dates as in Germany": "SET datestyle = 'German'",
    "dates as in SQL": "SET datestyle = 'SQL, MDY'",
    "intervals by ISO": "SET intervalstyle = 'iso_8601'",
    "intervals by SQL": "SET intervalstyle = 'sql_standard'",
    "a far zone": "SET timezone = 'Pacific/Kiritimati'",
    "an odd zone": "SET timezone = 'Asia/Kathmandu'",
    "few digits": "SET extra_float_digits = -15",
    "escaped bytes": "SET bytea_output = 'escape'",
    "a Latin client": "SET client_encoding = 'LATIN1'",
    "a client without encoding": "SET client_encoding = 'SQL_ASCII'",
    "old strings": "SET standard_conforming_strings = off; SET backslash_quote = on",
    "read only by default": "SET default_transaction_read_only = on; SET transaction_read_only = off",
    "serializable": "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL SERIALIZABLE",
}


@pytest.mark.conformance(51, 60)
@pytest.mark.parametrize("setting", SESSIONS.values(), ids=SESSIONS)
def test_settings_of_the_callers_session_do_not_matter(
    queue: venturi.Queue, connect: Connect, setting: t.LiteralString
) -> None:
    """Dates, zones, encodings and levels of the session are the caller's own affair (case 088)."""
    caller = connect()
    caller.execute(setting)
    _every_verb(queue, caller)


@pytest.mark.parametrize("autocommit", [False, True])
def test_a_pipeline_of_the_caller_works(queue: venturi.Queue, connect: Connect, autocommit: bool) -> None:
    """Inside ``conn.pipeline()`` every verb does what it does outside, and keyed enqueues stay one transaction.

    Case 045.
    """
    caller = connect(autocommit=autocommit)
    with caller.pipeline():
        _every_verb(queue, caller)
        caller.execute("SELECT 1")
        queue.enqueue_many([Plain()] * 1200, conn=caller)
        queue.enqueue(Keyed("next"), conn=caller)
    caller.commit()
    assert queue.stats().kinds["plain"].ready == 1201


def test_an_open_cursor_of_the_caller_goes_on(queue: venturi.Queue, connect: Connect) -> None:
    """A server-side cursor that is half read is read to its end after every verb (cases 039, 045)."""
    caller = connect()
    with caller.cursor("half") as cursor:
        cursor.itersize = 3
        cursor.execute("SELECT generate_series(1, 10)")
        assert cursor.fetchone() == (1,)
        _every_verb(queue, caller)
        assert [number for (number,) in cursor] == list(range(2, 11))


@pytest.mark.parametrize("autocommit", [False, True])
def test_threads_that_share_a_connection_take_turns(queue: venturi.Queue, connect: Connect, autocommit: bool) -> None:
    """All that they enqueue on it is there with its commit, and no merge is lost between two of them (case 045)."""
    tasks: list[object] = [task for n in range(50) for task in (Plain(str(n)), Keyed("a", 1))]
    with connect(autocommit=autocommit) as caller, ThreadPoolExecutor(8) as pool:
        receipts = list(pool.map(functools.partial(queue.enqueue, conn=caller), tasks))
        assert len(queue.jobs(limit=100)) == (51 if autocommit else 0)
    assert {job.id for job in queue.jobs(limit=100)} == {receipt.id for receipt in receipts}
    (keyed,) = queue.jobs(kind="keyed")
    assert keyed.payload["number"] == 50


@pytest.mark.conformance(53)
@pytest.mark.parametrize("pipelined", [False, True])
def test_a_keyed_enqueue_in_autocommit_is_one_transaction(
    queue: venturi.Queue, connect: Connect, pipelined: bool
) -> None:
    """Lock, look and write of one keyed enqueue share one transaction, also where the caller has none."""
    caller, observer = connect(autocommit=True), connect(autocommit=True)
    queue.enqueue(Keyed("a", 1), conn=caller)
    seen: list[bool] = []

    @venturi.task("keyed.watching")
    class Watching:
        def dedup_key(self) -> str:
            return "w"

        def merge(self, existing: venturi.Pending[Watching]) -> venturi.Merge[Watching]:
            seen.append(bool(_held(observer, caller.info.backend_pid)))
            return venturi.Replace()

    def twice() -> None:
        queue.enqueue(Watching(), conn=caller)
        caller.execute("SELECT 1")
        queue.enqueue(Watching(), conn=caller)

    if pipelined:
        with caller.pipeline():
            twice()
    else:
        twice()
    assert seen == [True]
    assert not _held(observer, caller.info.backend_pid)
    assert len(queue.jobs(kind="keyed.watching")) == 1


@pytest.mark.conformance(53)
def test_each_enqueue_in_autocommit_is_committed_at_once(queue: venturi.Queue, connect: Connect) -> None:
    """Without a transaction of the caller's, jobs and merges are there when the call returns (case 039)."""
    caller = connect(autocommit=True)
    for task in (Plain(), Keyed("a", 1), Keyed("a", 1)):
        receipt = queue.enqueue(task, conn=caller)
        assert queue.job(receipt.id) is not None
    assert [entry.outcome for entry in queue.journal(receipt.id)] == ["merged"]
    assert len(queue.enqueue_many([Plain(), Keyed("a", 1)], conn=caller)) == 2
    assert len(queue.jobs()) == 3


@pytest.mark.conformance(54)
def test_enqueue_on_a_connection_uses_no_other(schema: str, connect: Connect) -> None:
    """A queue that can reach no server of its own serves callers that can."""
    lonely = venturi.Queue(schema, dsn="host=127.0.0.1 port=1 connect_timeout=1")
    caller = connect()
    _every_verb(lonely, caller)


@pytest.mark.conformance(51)
@pytest.mark.parametrize("conn", ["dbname=x", 5, object()])
def test_what_is_no_connection_is_refused(queue: venturi.Queue, conn: t.Any) -> None:
    """conn= takes a psycopg connection; a string or something else is a TypeError."""
    with pytest.raises(TypeError, match="conn must be a psycopg"):
        queue.enqueue(Plain(), conn=conn)


@pytest.mark.conformance(55)
@pytest.mark.parametrize("path", ["''", "decoy", "pg_temp, decoy"])
def test_the_search_path_does_not_matter(queue: venturi.Queue, connect: Connect, path: t.LiteralString) -> None:
    """Tables of the same names that come first on the search_path are not touched, by no verb (case 147)."""
    connection = connect(autocommit=True)
    connection.execute("DROP SCHEMA IF EXISTS decoy CASCADE; CREATE SCHEMA decoy")
    for table in ("jobs", "live", "journal", "dead", "cancels", "workers"):
        connection.execute(sql.SQL("CREATE TABLE {} (id int)").format(sql.Identifier("decoy", table)))
    caller = connect()
    caller.execute("SET search_path = " + path)
    _every_verb(queue, caller)
    caller.commit()
    for table in ("jobs", "live", "journal"):
        count = sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier("decoy", table))
        assert connection.execute(count).fetchone() == (0,)
    connection.execute("DROP SCHEMA decoy CASCADE")


@pytest.mark.conformance(60)
def test_every_verb_sees_and_does_only_what_the_transaction_does(queue: venturi.Queue, connect: Connect) -> None:
    """Before the commit the caller sees its own work and nobody else does; after a rollback nothing has happened."""
    outside = queue.enqueue(Plain()).id
    dead = _dead(queue, connect)
    caller = connect()
    inside = queue.enqueue_many([Plain(), Keyed("a")], conn=caller)[0].id
    assert queue.cancel(outside, conn=caller)
    assert queue.requeue(dead, conn=caller)
    assert _statuses(queue, caller, inside, outside, dead) == ["pending", "cancelled", "pending"]
    assert _statuses(queue, None, inside, outside, dead) == [None, "pending", "dead"]
    assert queue.stats(conn=caller).kinds["plain"].ready == 2
    assert (queue.stats().kinds["plain"].ready, queue.stats().kinds["plain"].dead) == (1, 1)
    caller.rollback()
    assert _statuses(queue, None, inside, outside, dead) == [None, "pending", "dead"]


def _every_verb(queue: venturi.Queue, caller: psycopg.Connection[t.Any]) -> None:
    """Use every verb of producers on the connection, and look whether the answers are right."""
    plain = queue.enqueue(Plain("a"), conn=caller, delay=MINUTES)
    first = queue.enqueue(Keyed("a", 1), conn=caller)
    second = queue.enqueue(Keyed("a", 2), conn=caller, at=dt.datetime(2100, 1, 1, tzinfo=dt.UTC))
    many = queue.enqueue_many([Keyed("a", 3), Keyed("b", 1), Keyed("b", 2)], conn=caller)
    more = queue.enqueue_many([Plain("b"), Plain("c")], conn=caller, priority=venturi.Priority.LOW)
    assert isinstance(plain.id, uuid.UUID)
    assert [r.action for r in (first, second, *many)] == ["inserted", "combined", "combined", "inserted", "combined"]
    job = queue.job(first.id, conn=caller)
    assert job is not None
    assert job.payload == {"key": "a", "number": 6}
    assert job.carry == {"seen": 1}
    later = queue.job(plain.id, conn=caller)
    assert later is not None
    assert later.visible_at is not None
    assert later.visible_at - later.created_at == MINUTES
    assert [entry.note for entry in queue.journal(first.id, conn=caller)] == ["Combine", "Combine"]
    assert queue.cancel(more[0].id, conn=caller)
    assert not queue.requeue(more[0].id, conn=caller)
    assert len(queue.jobs(status="pending", conn=caller)) == 4
    extra = queue.enqueue(Plain(), conn=caller)
    assert queue.cancel(extra.id, conn=caller)
    stats = queue.stats(conn=caller).kinds
    assert (stats["plain"].ready, stats["plain"].scheduled, stats["keyed"].ready) == (1, 1, 2)


def _settings(caller: psycopg.Connection[t.Any]) -> tuple[object, ...]:
    return (
        caller.autocommit,
        caller.row_factory,
        caller.cursor_factory,
        caller.isolation_level,
        caller.read_only,
        caller.prepare_threshold,
        caller.info.parameter_status("TimeZone"),
        caller.info.parameter_status("DateStyle"),
    )


def _held(observer: psycopg.Connection[t.Any], pid: int) -> int:
    query = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = %s"
    row = observer.execute(query, (pid,)).fetchone()
    assert row is not None
    return int(row[0])


def _dead(queue: venturi.Queue, connect: Connect) -> uuid.UUID:
    """A dead job, made by hand."""
    id_ = queue.enqueue(Plain()).id
    query = sql.SQL("""WITH gone AS (DELETE FROM {} WHERE id = %s RETURNING id, kind)
                       INSERT INTO {} SELECT id, kind, now(), 1, 1 FROM gone""")
    tables = (sql.Identifier(queue.schema, name) for name in ("live", "dead"))
    connect(autocommit=True).execute(query.format(*tables), (id_,))
    return id_


def _statuses(queue: venturi.Queue, conn: psycopg.Connection[t.Any] | None, *ids: uuid.UUID) -> list[str | None]:
    jobs = [queue.job(id_, conn=conn) for id_ in ids]
    return [None if job is None else job.status for job in jobs]
