"""One enqueue: what it stores, what it refuses before it says a word to the server, and on which connections."""

from __future__ import annotations

import collections.abc as cabc
import datetime as dt
import time
import typing as t
import uuid
from concurrent.futures import ThreadPoolExecutor
from zoneinfo import ZoneInfo

import psycopg
import pytest
from fixtures.plain import Keyed, Plain, both
from fixtures.statements import traced
from fixtures.work import ended, working
from psycopg import sql

import venturi
from venturi.ids import uuid7

Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[t.Any]]

FAR = dt.datetime(9999, 12, 1, tzinfo=dt.UTC)


@pytest.fixture
def schema(emptied: str) -> str:
    """One schema for all tests here, emptied after each."""
    return emptied


@pytest.mark.conformance(37)
@both
def test_a_new_job_is_pending_and_untouched(queue: venturi.Queue, connect: Connect, task: t.Any) -> None:
    """The receipt names the job; it has never run, never failed, has no carry, and nobody owns it."""
    receipt = queue.enqueue(task)
    assert receipt == venturi.Receipt(receipt.id, "inserted")
    job = _job(queue, receipt)
    assert (job.status, job.run_count, job.failure_count, job.carry) == ("pending", 0, 0, None)
    assert (job.owner, job.lease_until, job.finished_at) == (None, None, None)
    carry = sql.SQL("SELECT carry IS NULL FROM {}").format(sql.Identifier(queue.schema, "live"))
    assert connect().execute(carry).fetchone() == (True,)


@pytest.mark.conformance(38)
def test_ids_are_of_version_7_and_sort_in_the_order_made(queue: venturi.Queue, connect: Connect) -> None:
    """Ten thousand ids made by one thread are uuids that sort in the order they were made in."""
    with connect() as caller:
        ids = [receipt.id for receipt in queue.enqueue_many([Plain()] * 10_000, conn=caller)]
        caller.rollback()
    assert {(type(id_), id_.version, id_.variant) for id_ in ids} == {(uuid.UUID, 7, uuid.RFC_4122)}
    assert ids == sorted(ids)


@pytest.mark.conformance(38)
def test_threads_make_no_id_twice() -> None:
    """Eight threads that make ten thousand ids each make eighty thousand different ones."""

    def make(_: int) -> list[uuid.UUID]:
        return [uuid7() for _ in range(10_000)]

    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(make, range(8)))
    assert len({id_ for ids in made for id_ in ids}) == 80_000


@pytest.mark.conformance(38)
@both
def test_an_id_that_exists_is_refused(queue: venturi.Queue, monkeypatch: pytest.MonkeyPatch, task: t.Any) -> None:
    """Should an id ever come twice, the second job is refused and the first stays as it is."""
    first = queue.enqueue(Plain("first"))

    def again(ticks: int, tail: int) -> int:
        return first.id.int

    monkeypatch.setattr("venturi.ids._number", again)
    with pytest.raises(psycopg.errors.UniqueViolation):
        queue.enqueue(task)
    with pytest.raises(psycopg.errors.UniqueViolation):
        queue.enqueue_many([task] * 3)
    assert [job.payload for job in queue.jobs()] == [{"value": "first"}]


@pytest.mark.conformance(39)
@pytest.mark.parametrize("skew", [3600, -3600])
@both
def test_the_databases_clock_counts(
    queue: venturi.Queue, connect: Connect, monkeypatch: pytest.MonkeyPatch, task: t.Any, skew: int
) -> None:
    """A producer whose clock is an hour off enqueues jobs for the server's now, and they run at once (case 087)."""
    now = time.time_ns
    monkeypatch.setattr("time.time_ns", lambda: now() + skew * 10**9)
    receipts = [queue.enqueue(task), queue.enqueue_many([Plain()])[0]]
    server = connect().execute("SELECT now()").fetchone()
    assert server is not None
    for receipt in receipts:
        job = _job(queue, receipt)
        assert job.created_at == job.visible_at
        assert abs(server[0] - job.created_at) < dt.timedelta(seconds=1)

    @queue.handler
    def plain(task: Plain) -> None:
        pass

    @queue.handler
    def keyed(task: Keyed) -> None:
        pass

    with working(queue):
        for receipt in receipts:
            ended(queue, receipt.id)


@pytest.mark.conformance(40)
@both
def test_a_delay_is_kept_to_the_microsecond(queue: venturi.Queue, task: t.Any) -> None:
    """delay= counts from the moment of creation, exactly; a negative one is none."""
    job = _job(queue, queue.enqueue(task, delay=dt.timedelta(minutes=5)))
    assert job.visible_at is not None
    assert job.visible_at - job.created_at == dt.timedelta(seconds=300)
    past = _job(queue, queue.enqueue(Keyed("past"), delay=dt.timedelta(days=-5)))
    assert past.visible_at == past.created_at


ZONES = {
    "UTC": dt.datetime(2100, 1, 1, 12, tzinfo=dt.UTC),
    "an offset": dt.datetime(2100, 1, 1, 12, 0, 0, 123456, tzinfo=dt.timezone(dt.timedelta(hours=-5, minutes=-30))),
    "the repeated hour": dt.datetime(2035, 11, 4, 1, 30, fold=1, tzinfo=ZoneInfo("America/New_York")),
    "an offset of seconds": dt.datetime(2100, 1, 1, tzinfo=dt.timezone(dt.timedelta(seconds=3221))),
}


@pytest.mark.conformance(40)
@pytest.mark.parametrize("at", ZONES.values(), ids=ZONES)
def test_an_instant_is_kept_in_any_zone(queue: venturi.Queue, at: dt.datetime) -> None:
    """at= is stored as the instant that it is, for one task and for many."""
    receipts = [queue.enqueue(Plain(), at=at), queue.enqueue(Keyed("a"), at=at), *queue.enqueue_many([Plain()], at=at)]
    assert {_job(queue, receipt).visible_at for receipt in receipts} == {at.astimezone(dt.UTC)}


WRONG: dict[str, tuple[dict[str, t.Any], type[Exception], str]] = {
    "a naive instant": ({"at": dt.datetime(2100, 1, 1)}, venturi.ConfigError, "at="),
    "both": ({"at": FAR, "delay": dt.timedelta(1)}, venturi.ConfigError, "at="),
    "seconds": ({"delay": 5}, TypeError, "delay"),
    "a date": ({"at": dt.date(2100, 1, 1)}, TypeError, "at"),
    "an unknown priority": ({"priority": 3}, venturi.ConfigError, "priority=3"),
    "notify": ({"notify": "no"}, venturi.ConfigError, "notify"),
}


@pytest.mark.conformance(40, 43)
@pytest.mark.parametrize(("options", "error", "text"), WRONG.values(), ids=WRONG)
def test_wrong_options_are_refused_before_any_sql(
    queue: venturi.Queue, connect: Connect, options: dict[str, t.Any], error: type[Exception], text: str
) -> None:
    """A wrong option raises and names itself, and nothing is sent: not even a transaction is begun (case 089)."""
    caller = connect()
    with traced(caller) as sent:
        for task in (Plain(), Keyed("a")):
            with pytest.raises(error, match=text):
                queue.enqueue(task, conn=caller, **options)
        with pytest.raises(error, match=text):
            queue.enqueue_many([Plain()], conn=caller, **options)
    assert sent.bytes == 0


class Bare:
    """No task."""


class Child(Plain):  # type: ignore[misc, unused-ignore]
    """A subclass of a task is none itself."""


@pytest.mark.conformance(43)
@pytest.mark.parametrize("thing", [Bare(), Bare, Plain, {"value": 1}, None, 5, Child()])
def test_what_is_no_task_is_refused_before_any_sql(queue: venturi.Queue, connect: Connect, thing: object) -> None:
    """An object without a kind, or a task class in place of an instance, is a TypeError."""
    caller = connect()
    with traced(caller) as sent:
        with pytest.raises(TypeError):
            queue.enqueue(thing, conn=caller)
        with pytest.raises(TypeError):
            queue.enqueue_many([Plain(), thing], conn=caller)
    assert sent.bytes == 0


UNSTORABLE: dict[str, tuple[t.Any, str]] = {
    "NaN": (float("nan"), "$.value"),
    "infinity": ([1.0, float("inf")], "$.value[1]"),
    "minus infinity": ({"a": -float("inf")}, "$.value.a"),
    "NUL": ("x\0y", "$.value"),
    "NUL inside": ({"a": [{"b": "\0"}]}, "$.value.a[0].b"),
    "NUL in a key": ({"a\0": 1}, "$.value"),
    "a lone surrogate": (["ok", "\ud800"], "$.value[1]"),
    "a set": ({1}, "$.value"),
    "an object": (object(), "$.value"),
}


@pytest.mark.conformance(44)
@pytest.mark.parametrize(("value", "path"), UNSTORABLE.values(), ids=UNSTORABLE)
def test_what_cannot_be_stored_is_refused_with_its_path(
    queue: venturi.Queue, connect: Connect, value: object, path: str
) -> None:
    """The error names where in the payload it is; nothing is sent, and the caller's transaction goes on.

    Cases 001, 003, 007.
    """
    caller = connect()
    with traced(caller) as sent:
        for task in (Plain(value), Keyed("a", value)):
            with pytest.raises(venturi.PayloadError) as caught:
                queue.enqueue(task, conn=caller)
            assert caught.value.path.startswith(path)
            assert caught.value.index is None
            assert caught.value.path in str(caught.value)
    assert sent.bytes == 0
    with pytest.raises(venturi.PayloadError):
        queue.enqueue(Plain(value))
    assert queue.jobs() == []


@pytest.mark.conformance(27, 40)
def test_instants_past_the_end_of_time_stop_there(queue: venturi.Queue) -> None:
    """What lies past the latest instant is due then, is not claimed now, and can be read; a negative delay is none."""
    options: list[dict[str, t.Any]] = [
        {"delay": dt.timedelta.max},
        {"at": dt.datetime.max.replace(tzinfo=dt.timezone(dt.timedelta(hours=-14)))},
    ]
    receipts = [queue.enqueue(task, **each) for each in options for task in (Plain(), Keyed(str(each)))]
    receipts += [queue.enqueue_many([Plain()], **each)[0] for each in options]
    assert {_job(queue, receipt).visible_at for receipt in receipts} == {FAR}
    assert queue.stats().kinds["plain"].ready == 0


@pytest.mark.conformance(41)
@pytest.mark.parametrize("at", [dt.datetime(2001, 1, 1, tzinfo=dt.UTC), dt.datetime.min.replace(tzinfo=dt.UTC)])
def test_an_instant_in_the_past_is_now(queue: venturi.Queue, at: dt.datetime) -> None:
    """A job for the past is due now, and does not overtake those that are ready already."""
    before = _job(queue, queue.enqueue(Plain()))
    for receipt in (queue.enqueue(Plain(), at=at), queue.enqueue(Keyed("a"), at=at)):
        job = _job(queue, receipt)
        assert job.visible_at == job.created_at
        assert before.visible_at is not None
        assert job.created_at > before.visible_at


@pytest.mark.conformance(42)
def test_the_payload_is_the_tasks_encoding(queue: venturi.Queue, connect: Connect) -> None:
    """What is stored is jsonb equal to the task's JSON; large numbers are exact."""
    value: dict[str, t.Any] = {"n": 2**53 + 1, "text": 'é "quoted" \\ \n 日本 🎉', "list": [1, 2.5, None, True], "": {}}
    receipts = [
        queue.enqueue(Plain(value)),
        queue.enqueue(Keyed("a", value)),
        queue.enqueue_many([Plain(value), Keyed("b", value)])[0],
        queue.enqueue_many([Plain(value)] * 1000)[999],  # in several statements
    ]
    for receipt in receipts:
        assert _job(queue, receipt).payload["value"] == value
    kind = sql.SQL("SELECT DISTINCT pg_typeof(payload)::text FROM {}").format(sql.Identifier(queue.schema, "jobs"))
    assert connect().execute(kind).fetchall() == [("jsonb",)]


@pytest.mark.conformance(45)
def test_an_enqueue_without_a_key_is_one_statement(queue: venturi.Queue, connect: Connect) -> None:
    """Body, live row and wake-up go in one statement, so that others see all of it or nothing."""
    caller = connect(autocommit=True)
    with traced(caller) as sent:
        queue.enqueue(Plain(), conn=caller, delay=dt.timedelta(1), priority=venturi.Priority.HIGH)
    assert sent.statements == 1
    both_rows = sql.SQL("SELECT (SELECT count(*) FROM {}), (SELECT count(*) FROM {})")
    tables = (sql.Identifier(queue.schema, name) for name in ("jobs", "live"))
    assert caller.execute(both_rows.format(*tables)).fetchone() == (1, 1)


def _job(queue: venturi.Queue, receipt: venturi.Receipt) -> venturi.Job:
    job = queue.job(receipt.id)
    assert job is not None
    return job
