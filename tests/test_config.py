"""Settings: the bound itself works, what lies outside is refused with its name, its value and the bound."""

from __future__ import annotations

import collections.abc as cabc
import datetime as dt
import os
import threading
import typing as t
from urllib.parse import urlencode

import psycopg
import pytest
from fixtures.work import ended, working
from psycopg import conninfo, sql

import venturi
from venturi import Backoff, ConfigError
from venturi.worker import Worker

NAN, INF = float("nan"), float("inf")
YEAR = 365 * 86400
MICROSECOND = dt.timedelta(microseconds=1)


@venturi.task("plain")
class Plain:
    pass


def ready(schema: str = "venturi") -> venturi.Queue:
    """A queue with a handler, which leads nowhere: whoever connects would fail otherwise than with ConfigError."""
    queue = venturi.Queue(schema, dsn="host=127.0.0.1 port=1")

    @queue.handler
    def plain(task: Plain) -> None:
        pass

    return queue


OUTSIDE: dict[str, tuple[t.Any, ...]] = {
    "concurrency": (0, -1, 1.5, True, "4", None, NAN, 10_001, 10**18),
    "poll": (0, 0.0009, MICROSECOND * 999, 3600.001, NAN, INF, "1", None, True),
    "lease": (0.999, YEAR + 1, dt.timedelta(days=366), NAN, INF, None),
    "shutdown_timeout": (-0.001, -MICROSECOND, NAN, INF, None, YEAR + 1, 10**400),
    "jitter": (-0.001, 1.001, NAN, INF, "0.5", True),
    "backstop": (0, -1, 2.5, NAN, True),
    "priority_ratio": (1, 0, -4, 2.5, NAN),
    "backoff": (None, 1, (1, 2), NAN),
    "stop": ("now", 1),
    "signals": (None, 1, "yes"),
    "block": (None, 0, "no"),
}

INSIDE: dict[str, tuple[t.Any, ...]] = {
    "concurrency": (1, 10_000),
    "poll": (0.001, dt.timedelta(milliseconds=1), 3600, dt.timedelta(hours=1)),
    "lease": (1, dt.timedelta(seconds=1), YEAR, dt.timedelta(days=365)),
    "shutdown_timeout": (0, dt.timedelta(0), 10**6),
    "jitter": (0, 1, 0.0, 1.0),
    "backstop": (1, None, 10**9),
    "priority_ratio": (2, None, 10**9),
    "backoff": (Backoff(0.001, 0.001), Backoff(YEAR, YEAR)),
    "stop": (None, threading.Event()),
    "signals": (False,),
}


@pytest.mark.conformance(12)
@pytest.mark.parametrize(("option", "value"), [(name, value) for name in OUTSIDE for value in OUTSIDE[name]])
def test_a_worker_refuses_what_is_out_of_bounds(option: str, value: t.Any) -> None:
    """Before it connects, with the option, the value and what is allowed in the message (case 174)."""
    with pytest.raises(ConfigError) as caught:
        ready().work(**{option: value})
    assert f"{option}={value!r}: must " in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.conformance(12)
@pytest.mark.parametrize(("option", "value"), [(name, value) for name in INSIDE for value in INSIDE[name]])
def test_a_worker_takes_the_bounds_themselves(option: str, value: t.Any) -> None:
    """The bound works, and nothing is clamped."""
    given = getattr(Worker(ready(), **{option: value}).settings, option)
    assert given == (value.total_seconds() if isinstance(value, dt.timedelta) else value)


@pytest.mark.conformance(12)
def test_an_option_that_does_not_exist_is_refused() -> None:
    """A misspelt option is not ignored, and of a handler's it is told which there are."""
    with pytest.raises(ConfigError, match="'concurency'"):
        ready().work(**t.cast(t.Any, {"concurency": 4}))
    with pytest.raises(ConfigError, match="'caps', only task, cap, dead_on"):
        ready().handler(**t.cast(t.Any, {"cap": 1, "caps": 2}))


@pytest.mark.conformance(12, 105)
@pytest.mark.parametrize(("cores", "slots"), [(1, 1), (2, 1), (3, 1), (4, 2), (16, 8), (64, 8), (None, 1)])
def test_defaults_are_those_of_the_table(monkeypatch: pytest.MonkeyPatch, cores: int | None, slots: int) -> None:
    """A worker without options has the documented ones; its slots depend on the machine."""
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    settings = Worker(ready()).settings
    assert settings.concurrency == slots
    assert (settings.poll, settings.lease, settings.shutdown_timeout) == (30, 60, 30)
    assert (settings.backoff, settings.jitter) == (Backoff(1, 3600), 0.5)
    assert (settings.backstop, settings.priority_ratio, settings.signals) == (25, 4, True)


CURVES = [(0, 1), (0.0009, 1), (NAN, 1), (1, NAN), (1, 0.5), (1, YEAR + 1), (YEAR + 1, YEAR + 2), ("1", 2), (1, None)]


@pytest.mark.conformance(12)
@pytest.mark.parametrize(("base", "cap"), CURVES)
def test_a_curve_out_of_bounds_is_refused(base: t.Any, cap: t.Any) -> None:
    """Base from 1 ms, cap from the base to 365 days (cases 079, 174)."""
    with pytest.raises(ConfigError, match=r"backoff (base|cap)="):
        Backoff(base, cap)


MAKERS: dict[str, tuple[cabc.Callable[[t.Any], object], tuple[t.Any, ...], tuple[t.Any, ...]]] = {
    "pool_size": (lambda value: venturi.Queue(pool_size=value), (0, -1, 1.5, NAN, True), (1, 10**6)),
    "notify": (lambda value: venturi.Queue(notify=value), (None, 1), (True, False)),
    "pooler": (lambda value: venturi.Queue(pooler=value), (None, 1), (True, False)),
    "cap": (lambda value: ready().handler(task=Plain, cap=value), (), (None, 1, 10**6)),
    "timeout": (
        lambda value: venturi.task("x", timeout=value),
        (0, -1, NAN, dt.timedelta(0), "1", True),
        (None, 0.001, MICROSECOND, 10**7),
    ),
    "backoff": (lambda value: venturi.task("x", backoff=value), (1, NAN, (1, 2)), (None, Backoff(0.001, 0.001))),
    "priority": (
        lambda value: venturi.task("x", priority=value),
        (-1, 3, 32767, "high", NAN, 1.0, True, None),
        (0, 1, 2, venturi.Priority.LOW),
    ),
}
REFUSED = [(name, value) for name, (_, outside, _) in MAKERS.items() for value in outside]
TAKEN = [(name, value) for name, (_, _, inside) in MAKERS.items() for value in inside]


@pytest.mark.conformance(3, 12)
@pytest.mark.parametrize(("option", "value"), REFUSED)
def test_what_is_made_with_a_wrong_option_is_refused(option: str, value: t.Any) -> None:
    """Queues, tasks and handlers say so when they are made (case 174)."""
    with pytest.raises(ConfigError) as caught:
        MAKERS[option][0](value)
    assert f"{option}={value!r}: must " in str(caught.value)


@pytest.mark.conformance(3, 12)
@pytest.mark.parametrize(("option", "value"), TAKEN)
def test_what_is_made_with_a_bound_works(option: str, value: t.Any) -> None:
    """The bounds themselves are fine."""
    MAKERS[option][0](value)


@pytest.mark.conformance(12)
@pytest.mark.parametrize("cap", [0, -1, 1.5, NAN, True])
def test_a_cap_out_of_bounds_is_refused(cap: t.Any) -> None:
    """A handler with room for nothing is none (case 174)."""
    queue = ready()
    with pytest.raises(ConfigError, match=f"cap={cap!r}: must "):

        @queue.handler(cap=cap)
        def other(task: Plain) -> None:
            pass


@pytest.mark.conformance(12)
@pytest.mark.parametrize(
    ("verb", "values"),
    [("jobs", (0, 1001, -1, NAN, None, True, 10**12)), ("requeue_many", (0, -1, 1.5, 2**63, 10**400))],
)
def test_a_limit_out_of_bounds_is_refused(verb: str, values: tuple[t.Any, ...]) -> None:
    """Before anything is sent: this queue leads nowhere (cases 167, 174)."""
    for value in values:
        with pytest.raises(ConfigError, match=f"limit={value!r}: must "):
            getattr(ready(), verb)(limit=value)


@pytest.mark.parametrize("kind", ["", "a\0", "\ud800", "x" * 201, 5, ["plain"], b"plain", Plain], ids=repr)
def test_a_filter_by_what_is_no_kind_is_refused(kind: t.Any) -> None:
    """Before anything is sent, so that no caller's transaction is lost by it (case 174)."""
    queue = ready()
    for look in (
        lambda: queue.jobs(kind=kind),
        lambda: queue.requeue_many(kind=kind),
        lambda: queue.cleanup(kind=kind, finished_before=dt.datetime(2030, 1, 1, tzinfo=dt.UTC)),
    ):
        with pytest.raises(ConfigError, match="kind="):
            look()


@pytest.mark.conformance(12)
def test_a_limit_at_its_bound_works(queue: venturi.Queue) -> None:
    """1 and 1000 for pages of jobs, 1 for a requeue."""
    queue.enqueue_many([Plain()] * 3)
    assert [len(queue.jobs(limit=limit)) for limit in (1, 1000)] == [1, 3]
    assert [queue.requeue_many(limit=limit) for limit in (1, 2**63 - 1)] == [0, 0]


NAMES = [
    "venturi_x",
    "jobs_v2",
    "a",
    "Venturi",
    "jobs-v2",
    '"a b"',
    "a b",
    "x" * 63,
    "ü" * 31,
    "100%",
    "{q}",
    "%s",
    "a'b",
]


@pytest.mark.conformance(226)
@pytest.mark.parametrize("name", NAMES)
def test_any_name_of_a_schema_works_end_to_end(dsn: str, name: str) -> None:
    """Enqueue, merge, batch, run, look, cancel and wake-up work, whatever the schema is called (cases 112, 149)."""
    queue = venturi.Queue(name, dsn=dsn)
    try:
        queue.migrate()
        _works(queue)
    finally:
        with psycopg.connect(dsn) as connection:
            connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(name)))
        queue.close()


@pytest.mark.conformance(226)
@pytest.mark.parametrize(
    "name", ["", "x" * 64, "ü" * 32, "a\0b", "pg_x", "pg_catalog", "information_schema", "\ud800", 5]
)
def test_an_impossible_name_of_a_schema_is_refused(name: t.Any) -> None:
    """When the queue is made, with the name in the message (case 149)."""
    with pytest.raises(ConfigError, match="schema="):
        venturi.Queue(name)


@pytest.mark.conformance(227)
def test_two_queues_of_one_database_share_nothing(queue: venturi.Queue, dsn: str) -> None:
    """Jobs, journal, workers and keys are apart, and dropping one schema leaves the other working."""
    other = venturi.Queue(queue.schema + "_b", dsn=dsn)
    other.migrate()
    first, second = queue.enqueue(Plain()), other.enqueue(Plain())
    assert (queue.job(second.id), other.job(first.id)) == (None, None)
    _works(queue)
    assert other.stats().kinds["plain"].ready == 1
    assert other.journal(first.id) == []
    with psycopg.connect(dsn) as connection:
        connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(other.schema)))
    with pytest.raises(venturi.SchemaError):
        other.enqueue(Plain())
    queue.enqueue(Plain())
    other.close()


@pytest.mark.conformance(228)
@pytest.mark.parametrize(
    ("table", "change"),
    [
        ("live", "priority = 3"),
        ("live", "priority = -1"),
        ("jobs", "priority = 3"),
        ("journal", "outcome = 9"),
        ("journal", "outcome = -1"),
        ("live", "failure_count = -1"),
        ("live", "owner = id"),
        ("live", "visible_at = 'infinity'"),
        ("jobs", "kind = ''"),
        ("jobs", "dedup_key = repeat('x', 1001)"),
    ],
)
def test_the_database_refuses_impossible_rows(
    queue: venturi.Queue, dsn: str, table: str, change: t.LiteralString
) -> None:
    """Every invariant has a CHECK."""
    queue.cancel(queue.enqueue(Plain()).id)
    queue.enqueue(Plain())
    with psycopg.connect(dsn) as connection, pytest.raises(psycopg.errors.CheckViolation):
        connection.execute(sql.SQL("UPDATE {} SET " + change).format(sql.Identifier(queue.schema, table)))


@pytest.mark.conformance(228)
def test_ids_are_uuids_and_text_keys_have_collation_c(schema: str, dsn: str) -> None:
    """The types of the columns are what the statements rely on."""
    query = """SELECT table_name, column_name, data_type, collation_name FROM information_schema.columns
               WHERE table_schema = %s AND table_name IN ('jobs', 'live', 'journal', 'dead')"""
    with psycopg.connect(dsn) as connection:
        columns = {(table, name): (type_, coll) for table, name, type_, coll in connection.execute(query, (schema,))}
    ids = [
        ("jobs", "id"),
        ("live", "id"),
        ("journal", "job_id"),
        ("dead", "id"),
        ("live", "owner"),
        ("journal", "worker"),
    ]
    assert {columns[each][0] for each in ids} == {"uuid"}
    keys = [(table, "kind") for table in ("jobs", "live", "journal", "dead")]
    keys += [("jobs", "dedup_key"), ("live", "dedup_key")]
    assert {columns[each] for each in keys} == {("text", "C")}


SOURCES = ["dsn", "VENTURI_DATABASE_URL", "DATABASE_URL", "PG*"]


@pytest.mark.parametrize("source", SOURCES)
def test_the_first_connection_setting_that_is_given_counts(
    schema: str, dsn: str, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """The argument, then VENTURI_DATABASE_URL, then DATABASE_URL, then libpq's own variables."""
    wrong = "host=127.0.0.1 port=1 connect_timeout=1"
    for name in SOURCES[SOURCES.index(source) + 1 : -1]:
        monkeypatch.setenv(name, wrong)
    for name in SOURCES[1 : SOURCES.index(source)]:
        monkeypatch.delenv(name, raising=False)
    if source == "PG*":
        for key, value in conninfo.conninfo_to_dict(dsn).items():
            name = {"dbname": "PGDATABASE", "user": "PGUSER"}.get(key, "PG" + key.upper())
            monkeypatch.setenv(name, str(value))
    elif source != "dsn":
        monkeypatch.setenv(source, dsn)
    queue = venturi.Queue(schema, dsn=dsn if source == "dsn" else None)
    queue.enqueue(Plain())
    queue.close()


def test_a_connection_string_that_cannot_be_read_is_named_but_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hold a password (case 168)."""
    monkeypatch.setenv("VENTURI_DATABASE_URL", "secret:word@host")
    with pytest.raises(ConfigError, match="VENTURI_DATABASE_URL") as caught:
        venturi.Queue().enqueue(Plain())
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["postgresql", "postgres"])
def test_an_unescaped_at_sign_in_a_password_is_refused(schema: str, dsn: str, scheme: str) -> None:
    """Its end would be taken for a host, and be named by whatever cannot reach that (case 168)."""
    with pytest.raises(ConfigError, match="%40") as caught:
        venturi.Queue(dsn=f"{scheme}://me:se@cret@127.0.0.1:1/x").stats()
    assert "cret" not in str(caught.value)
    parts = conninfo.conninfo_to_dict(dsn)
    query = urlencode({key: value for key, value in parts.items() if key != "dbname"} | {"application_name": "me@here"})
    queue = venturi.Queue(schema, dsn=f"{scheme}:///{parts['dbname']}?{query}".replace("%40", "@"))
    queue.enqueue(Plain())
    queue.close()


def test_a_listen_dsn_that_cannot_be_read_ends_the_worker(schema: str, dsn: str) -> None:
    """It is not tried again and again as if the server were away, nor told (case 174)."""
    queue = venturi.Queue(schema, dsn=dsn, listen_dsn="secret:word@host")
    queue.handler(task=Plain)(lambda task: None)
    with pytest.raises(ConfigError, match="listen_dsn") as caught:
        queue.work(signals=False)
    assert "secret" not in str(caught.value)
    queue.close()


def _works(queue: venturi.Queue) -> None:
    """A queue does all that it is for."""

    @venturi.task("keyed")
    class Keyed:
        key: str

        def dedup_key(self) -> str:
            return self.key

    @queue.handler(task=Keyed)
    def keyed(task: Keyed) -> None:
        pass

    first = queue.enqueue(Keyed("a"))
    assert queue.enqueue(Keyed("a")).id == first.id
    many = queue.enqueue_many([Plain()] * 1000 + [Keyed("b")])
    assert queue.cancel(many[0].id)
    with working(queue):
        ended(queue, first.id)
        ended(queue, many[-1].id)
    assert [entry.outcome for entry in queue.journal(first.id)] == ["merged", "completed"]
