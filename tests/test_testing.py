"""Helpers for tests of user code: nothing leaves the test's transaction, and nothing passes that production refuses."""

from __future__ import annotations

import collections.abc as cabc
import datetime as dt
import os
import shutil
import subprocess
import sys
import threading
import typing as t
import uuid
from pathlib import Path

import attrs
import psycopg
import pytest

import venturi
from venturi.testing import assert_enqueued, call, drain, queued, using

Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[t.Any]]

HOUR = dt.timedelta(hours=1)
EXAMPLE = Path(__file__).parent.parent / "examples" / "test_app.py"


@attrs.define
class Cursor:
    page: int = 0


@venturi.task("test.welcome")
class Welcome:
    user_id: t.Any
    locale: str = "en"


@venturi.task("test.feed", carry=Cursor, timeout=60)
class ImportFeed:
    url: str


@venturi.task("test.any", carry=dict[str, t.Any])
class Anything:
    value: t.Any


@venturi.Queue("aside").handler
def feed(task: ImportFeed, ctx: venturi.Context[Cursor]) -> venturi.Outcome:
    """Reads three pages, and says what it sees."""
    if task.url == "gone":
        raise venturi.PermanentError("the feed is gone")
    ctx.cancelled.check()
    ctx.attach(page=ctx.carry.page, run=ctx.run_count, failures=ctx.failure_count, past=len(ctx.history))
    ctx.carry.page += 1
    return venturi.Pause(HOUR) if ctx.carry.page < 3 else venturi.Completed("3 pages")


@pytest.fixture
def conn(connect: Connect) -> psycopg.Connection[t.Any]:
    """The connection of a test of the user's."""
    return connect()


def empty(queue: venturi.Queue) -> bool:
    """Whether nothing of the queue was committed."""
    return queue.jobs() == []


# --- One handler


@pytest.mark.conformance(251)
def test_call_runs_a_handler_as_a_worker_would_without_a_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outcome, carry and evidence come back; the carry given is not changed, and a first run has the default."""
    monkeypatch.setenv("VENTURI_DATABASE_URL", "host=/nowhere")
    first = call(feed, ImportFeed("x"))
    assert (first.outcome, first.carry) == (venturi.Pause(HOUR), Cursor(1))
    given = Cursor(page=2)
    entry = venturi.Entry(1, uuid.uuid4(), "", 1, 1, "retried", dt.datetime.now(dt.UTC), None, None, None, None, None)
    last = call(feed, ImportFeed("x"), carry=given, run_count=4, failure_count=1, history=[entry])
    assert last.outcome == venturi.Completed("3 pages")
    assert last.carry.page == 3
    assert given == Cursor(2)
    assert last.evidence == {"page": 2, "run": 4, "failures": 1, "past": 1}


@pytest.mark.conformance(251)
def test_what_a_called_handler_raises_reaches_the_test() -> None:
    """Failures and stops are exceptions to be expected with pytest.raises."""
    with pytest.raises(venturi.PermanentError, match="gone"):
        call(feed, ImportFeed("gone"))
    with pytest.raises(venturi.Cancelled) as caught:
        call(feed, ImportFeed("x"), cancelled="shutdown")
    assert caught.value.reason == "shutdown"
    with pytest.raises(venturi.LeaseLost):
        call(feed, ImportFeed("x"), cancelled="lease lost")


def test_call_gives_the_context_of_a_run() -> None:
    """State, id, logger, time to the timeout and current_context() are there, context variables of the test are not."""
    job = uuid.uuid4()

    @venturi.Queue("aside").handler
    def look(task: ImportFeed, ctx: venturi.Context[Cursor, t.Any]) -> None:
        assert venturi.current_context() is ctx
        assert ctx.time_remaining is not None
        assert dt.timedelta(seconds=50) < ctx.time_remaining <= dt.timedelta(seconds=60)
        assert (ctx.id, ctx.kind) == (job, "test.feed")
        ctx.state.append(task)

    seen: list[ImportFeed] = []
    task = ImportFeed("x")
    call(look, task, id=job, state=seen)
    assert seen == [task]
    assert seen[0] is not task
    with pytest.raises(venturi.ConfigError):
        venturi.current_context()


@pytest.mark.conformance(251)
@pytest.mark.parametrize(
    "value",
    [lambda: None, {1, 2}, float("nan"), dt.datetime.now(dt.UTC), object(), "\0"],
    ids=lambda v: type(v).__name__,
)
def test_what_cannot_be_stored_is_refused_in_tests_too(queue: venturi.Queue, conn: t.Any, value: object) -> None:
    """Payload, carry and evidence go through the encoding of production, in call and in an enqueue to be drained.

    Case 009.
    """

    @queue.handler
    def carries(task: Anything, ctx: venturi.Context[dict[str, t.Any]]) -> None:
        ctx.carry = {"value": value}

    @venturi.Queue("aside").handler
    def attaches(task: Anything, ctx: venturi.Context[dict[str, t.Any]]) -> None:
        ctx.attach(value=value)

    for handler, payload in [(carries, value), (carries, None), (attaches, None)]:
        with pytest.raises(venturi.PayloadError):
            call(handler, Anything(payload))
    with pytest.raises(venturi.PayloadError), using(conn, queue=queue):
        queue.enqueue(Anything(value))
    assert queued(conn, queue=queue) == []


@pytest.mark.parametrize("result", ["done", 0, venturi.Completed])
def test_a_wrong_return_value_fails_the_test(result: t.Any) -> None:
    """A worker would record a failure; the test does not pass either."""

    @venturi.Queue("aside").handler
    def wrong(task: Welcome) -> venturi.Outcome:
        return t.cast(venturi.Outcome, result)

    with pytest.raises(TypeError):
        call(wrong, Welcome(1))


def test_a_coroutine_fails_the_test() -> None:
    """It is closed, without a warning that it was never awaited."""

    async def wait() -> None: ...

    @venturi.Queue("aside").handler
    def waits(task: Welcome) -> venturi.Outcome:
        return t.cast(venturi.Outcome, wait())

    with pytest.raises(TypeError, match="coroutine"):
        call(waits, Welcome(1))


def test_call_refuses_what_is_no_handler_and_the_task_of_another() -> None:
    """Callers without a type checker are told."""
    with pytest.raises(TypeError, match="decorated"):
        call(t.cast(t.Any, lambda task: None), Welcome(1))  # pyright: ignore[reportUnknownLambdaType]
    with pytest.raises(TypeError, match="ImportFeed, not Welcome"):
        call(t.cast(t.Any, feed), Welcome(1))


# --- What is queued


@pytest.mark.conformance(253)
def test_queued_gives_the_pending_tasks_as_values(queue: venturi.Queue, conn: psycopg.Connection) -> None:
    """After an enqueue on the connection it equals the task; by priority and time, of one class or of all."""
    assert queued(conn, queue=queue) == []
    queue.enqueue(Welcome(7), conn=conn)
    assert queued(conn, queue=queue) == [Welcome(7)]
    queue.enqueue(ImportFeed("x"), conn=conn, delay=HOUR)
    queue.enqueue(Welcome(8), conn=conn, priority=venturi.Priority.HIGH)
    assert queued(conn, queue=queue) == [Welcome(8), Welcome(7), ImportFeed("x")]
    assert queued(conn, ImportFeed, queue=queue) == [ImportFeed("x")]
    conn.rollback()
    assert queued(conn, queue=queue) == []
    assert empty(queue)


def test_queued_reads_kinds_that_only_other_code_has_met(queue: venturi.Queue, dsn: str, conn: t.Any) -> None:
    """With a class given it does; without one it names the kind instead of hiding the job."""
    queue.enqueue(Welcome(7), conn=conn)
    stranger = venturi.Queue(queue.schema, dsn=dsn)
    with pytest.raises(venturi.UnknownKindError, match=r"test\.welcome"):
        queued(conn, queue=stranger)
    assert queued(conn, Welcome, queue=stranger) == [Welcome(7)]


def test_assert_enqueued_compares_some_fields_and_shows_what_is_there(queue: venturi.Queue, conn: t.Any) -> None:
    """It gives the first task that fits; its message lists the others, and a wrong field's name is an error."""
    with pytest.raises(AssertionError, match=r"Welcome\(user_id=7\).*: none"):
        assert_enqueued(conn, Welcome, queue=queue, user_id=7)
    queue.enqueue_many([Welcome(7), Welcome(8, "fr")], conn=conn)
    assert assert_enqueued(conn, Welcome, queue=queue, locale="fr") == Welcome(8, "fr")
    assert assert_enqueued(conn, Welcome, queue=queue) == Welcome(7)
    with pytest.raises(AssertionError, match=r"user_id=8, locale='fr'\)"):
        assert_enqueued(conn, Welcome, queue=queue, user_id=9)
    with pytest.raises(TypeError, match="no field 'user'"):
        assert_enqueued(conn, Welcome, queue=queue, user=7)


def test_a_queue_that_was_never_migrated_is_named(dsn: str, connect: Connect) -> None:
    """Looking and draining raise a SchemaError that says what to do."""
    stranger = venturi.Queue("never_migrated", dsn=dsn)
    stranger.handler(feed)
    for ask in (lambda: queued(connect(), queue=stranger), lambda: drain(connect(), queue=stranger)):
        with pytest.raises(venturi.SchemaError, match=r"never_migrated.*venturi migrate"):
            ask()


# --- Code that opens its own connections


def test_code_that_enqueues_without_a_connection_can_be_taken_in(queue: venturi.Queue, conn: t.Any) -> None:
    """Within using() every verb is part of the test's transaction; outside, and on other threads, nothing changes."""
    with using(conn, queue=queue):
        receipt = queue.enqueue(Welcome(7))
        queue.enqueue_many([Welcome(8), ImportFeed("x")])
        assert queue.job(receipt.id) is not None
        assert queue.cancel(receipt.id)
        elsewhere = threading.Thread(target=queue.enqueue, args=[Welcome(9)])
        elsewhere.start()
        elsewhere.join()
    assert queued(conn, queue=queue) == [Welcome(8), ImportFeed("x"), Welcome(9)]
    assert [job.payload["user_id"] for job in queue.jobs()] == [9]
    conn.rollback()
    assert len(queue.jobs()) == 1


def test_using_ends_with_its_block_and_can_be_nested(queue: venturi.Queue, connect: Connect) -> None:
    """An error inside does not leave the connection lent; the inner of two connections is used."""
    outer, inner = connect(), connect()
    with using(outer, queue=queue):
        with pytest.raises(TypeError), using(inner, queue=queue):
            queue.enqueue(queue.enqueue(Welcome(1)))
        queue.enqueue(Welcome(2))
    queue.enqueue(Welcome(3))
    outer.commit()
    assert sorted(job.payload["user_id"] for job in queue.jobs()) == [2, 3]


# --- The plugin


@pytest.mark.parametrize("given", [True, False], ids=["a given server", "a private server"])
def test_the_example_of_tests_passes_and_leaves_nothing(
    given: bool, dsn: str, connect: Connect, tmp_path: Path
) -> None:
    """The plugin uses the URL of VENTURI_TEST_DATABASE_URL, else a server of its own; no test commits anything."""
    shutil.copy(EXAMPLE, tmp_path)
    environment = {name: value for name, value in os.environ.items() if name != "VENTURI_TEST_DATABASE_URL"}
    environment |= {"PYTHONPATH": str(Path(venturi.__file__).parent.parent), "DATABASE_URL": "host=/nowhere"}
    if given:
        environment["VENTURI_TEST_DATABASE_URL"] = dsn
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "test_app.py"]
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 passed" in result.stdout
    with connect(autocommit=True) as connection:
        there = connection.execute("SELECT to_regclass('venturi.jobs') IS NOT NULL").fetchone()
        assert there == (given,)
        if given:
            assert connection.execute("SELECT count(*) FROM venturi.jobs").fetchone() == (0,)
            connection.execute("SET client_min_messages = warning; DROP SCHEMA venturi CASCADE")
