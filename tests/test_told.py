"""Runs that were told to stop, user code around the handler, and the library's own errors."""

from __future__ import annotations

import inspect
import logging
import threading
import typing as t

import attrs
import psycopg
import pytest
from fixtures.waiting import eventually
from fixtures.work import ended, until, working
from psycopg import sql

import venturi
from venturi import Backoff, Context
from venturi.store.claiming import Claiming


@venturi.task("told", timeout=0.2)
class Timed:
    pass


@venturi.task("untimed")
class Untimed:
    pass


def waits(started: threading.Event) -> t.Callable[[t.Any, Context], None]:
    """A handler that gives way as soon as it is told to."""

    def handle(task: t.Any, ctx: Context) -> None:
        started.set()
        ctx.cancelled.wait(10)
        ctx.cancelled.check()

    return handle


@pytest.fixture
def schema(emptied: str) -> str:
    """One schema for all tests here, emptied after each."""
    return emptied


@pytest.mark.conformance(34)
def test_a_run_that_gives_way_at_shutdown_is_released(queue: venturi.Queue) -> None:
    """It counts as no failure, and the job is pending again at once."""
    started = threading.Event()
    queue.handler(task=Untimed)(waits(started))
    receipt = queue.enqueue(Untimed())
    with working(queue):
        assert started.wait(5)
    (entry,) = queue.journal(receipt.id)
    job = queue.job(receipt.id)
    assert job is not None
    assert (entry.outcome, job.status, job.failure_count) == ("released", "pending", 0)


@pytest.mark.conformance(34)
def test_a_run_that_gives_way_at_its_timeout_has_failed(queue: venturi.Queue) -> None:
    """A retryable failure with the reason in its note."""
    queue.handler(task=Timed)(waits(threading.Event()))
    receipt = queue.enqueue(Timed())
    with working(queue, backoff=Backoff(60, 60)):
        (entry,) = until(queue, receipt.id, "retried")
    assert "timeout" in (entry.note or "")
    assert entry.failure_count == 1


@pytest.mark.conformance(34)
def test_a_run_that_gives_way_to_an_operator_is_cancelled(queue: venturi.Queue) -> None:
    """The job never runs again."""
    started = threading.Event()
    queue.handler(task=Untimed)(waits(started))
    receipt = queue.enqueue(Untimed())
    with working(queue):
        assert started.wait(5)
        assert queue.cancel(receipt.id)
        ended(queue, receipt.id, "cancelled")
    assert [entry.outcome for entry in queue.journal(receipt.id)] == ["cancelled"]


@pytest.mark.conformance(34)
def test_a_run_that_gives_way_to_a_lost_lease_writes_nothing(queue: venturi.Queue, dsn: str) -> None:
    """Its job may run elsewhere by now: what became of it is told there."""
    started = threading.Event()
    caught: list[BaseException] = []

    @queue.handler(task=Untimed)
    def handle(task: Untimed, ctx: Context) -> None:
        try:
            waits(started)(task, ctx)
        except venturi.LeaseLost as error:
            caught.append(error)
            raise

    receipt = queue.enqueue(Untimed())
    with working(queue, lease=1) as worker:
        assert started.wait(5)
        with psycopg.connect(dsn) as connection:
            table = sql.Identifier(queue.schema, "live")
            connection.execute(sql.SQL("UPDATE {} SET run_count = run_count + 1").format(table))
        eventually(lambda: caught, what="the handler is told")
        worker.stop()
    assert queue.journal(receipt.id) == []


@pytest.mark.conformance(34)
def test_a_run_that_gives_way_to_a_lease_that_was_not_lost_is_released(
    queue: venturi.Queue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The clock has told it so in an outage, and nobody has taken the claim: the job is pending again at once.

    Case 064.
    """
    caplog.set_level(logging.INFO)

    def away(*arguments: object) -> t.NoReturn:
        raise psycopg.OperationalError("away")

    monkeypatch.setattr(Claiming, "renew", away)

    @queue.handler(task=Untimed)
    def handle(task: Untimed, ctx: Context) -> None:
        if ctx.run_count == 1:
            waits(threading.Event())(task, ctx)

    receipt = queue.enqueue(Untimed())
    with working(queue, lease=1):
        released, completed = until(queue, receipt.id, "released", "completed")
    assert (released.note, completed.failure_count) == ("the run was told to stop: lease lost", 0)
    assert f"job {receipt.id} of kind untimed: run 1 released" in caplog.text
    assert "is not recorded" not in caplog.text


@attrs.define
class Choosy:
    """A carry that can be made once, when the task is declared."""

    made: t.ClassVar[int] = 0
    value: int = 0

    def __attrs_post_init__(self) -> None:
        Choosy.made += 1
        if Choosy.made > 1:
            raise RuntimeError("no second carry")


@venturi.task("strict", carry=dict)
class Strict:
    number: int = attrs.field(default=0)

    def __attrs_post_init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise SystemExit("not on this thread")


@venturi.task("choosy", carry=Choosy)
class Carrying:
    pass


@pytest.mark.conformance(35)
@pytest.mark.parametrize(("task", "text"), [(Strict(), "not on this thread"), (Carrying(), "no second carry")])
def test_user_code_before_the_handler_fails_that_run_alone(queue: venturi.Queue, task: t.Any, text: str) -> None:
    """A class or a carry that cannot be made is a failed run at once, with the true cause; others go on (case 023)."""
    for kind in (Strict, Carrying):
        queue.handler(task=kind)(lambda task: None)
    queue.handler(task=Untimed)(lambda task: None)
    broken, fine = queue.enqueue(task), queue.enqueue(Untimed())
    with working(queue, concurrency=1, backstop=1):
        (entry,) = until(queue, broken.id, "dead")
        ended(queue, fine.id)
    assert text in (entry.note or "")


@pytest.mark.conformance(35)
def test_every_error_of_the_library_has_one_base() -> None:
    """Those of settings are ValueErrors too, and all show the path that users import."""
    errors = [each for each in vars(venturi).values() if inspect.isclass(each) and issubclass(each, BaseException)]
    assert len(errors) >= 10
    assert all(issubclass(each, venturi.VenturiError) for each in errors)
    assert {each.__module__ for each in errors} == {"venturi"}
    assert issubclass(venturi.ConfigError, ValueError)
    assert issubclass(venturi.DuplicateKindError, venturi.ConfigError)
    assert issubclass(venturi.LeaseLost, venturi.Cancelled)


@attrs.define
class Meters:
    number: int

    def __attrs_post_init__(self) -> None:
        if self.number < 0:
            raise ValueError("below zero")


@venturi.task("measured")
class Measured:
    meters: Meters


@pytest.mark.conformance(35)
def test_an_error_tells_what_was_done_and_why_it_failed(queue: venturi.Queue) -> None:
    """The text holds the place and the cause's own text, and the cause is attached."""
    meters = Meters(1)
    meters.number = -1
    with pytest.raises(venturi.VenturiError, match=r"meters.*below zero") as caught:
        queue.enqueue(Measured(meters))
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.conformance(35)
def test_errors_carry_their_facts_as_attributes() -> None:
    """Kind, path, index, reason and delay can be read without parsing a text."""
    import datetime as dt

    assert venturi.UnknownKindError("x").kind == "x"
    error = venturi.PayloadError("is bad", path="$.a", index=3)
    assert (error.problem, error.path, error.index) == ("is bad", "$.a", 3)
    assert (venturi.Cancelled("timeout").reason, venturi.LeaseLost().reason) == ("timeout", "lease lost")
    assert venturi.RetryLater(dt.timedelta(7)).delay == dt.timedelta(7)
    with pytest.raises(TypeError, match="delay"):
        venturi.RetryLater(t.cast(dt.timedelta, 7))
