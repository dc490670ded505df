"""How a run ends: what it returns, what it raises, and what is recorded of that."""

from __future__ import annotations

import asyncio
import datetime as dt
import gc
import math
import sys
import threading
import typing as t
import weakref

import attrs
import pytest
from fixtures.waiting import eventually
from fixtures.work import ended, until, working

import venturi
from venturi import Backoff, Completed, Context, Pause, PermanentError, RetryLater

FAR = dt.datetime(9999, 12, 1, tzinfo=dt.UTC)
FAST = Backoff(0.001, 0.001)


@attrs.define
class State:
    number: int = 0


@venturi.task("running", carry=State, backoff=FAST)
class Running:
    pass


Handle: t.TypeAlias = t.Callable[[Running, Context[State]], t.Any]


def handled(
    queue: venturi.Queue, handle: Handle, *outcomes: str, **options: t.Any
) -> tuple[venturi.Job, venturi.Entry]:
    """Run one job with the handler until its journal reads so; the job, and its last entry."""
    queue.handler(task=Running)(handle)
    receipt = queue.enqueue(Running())
    with working(queue, concurrency=1, **options):
        entries = until(queue, receipt.id, *outcomes, timeout=10)
    job = queue.job(receipt.id)
    assert job is not None
    return job, entries[-1]


def changing(handle: t.Callable[[], t.Any]) -> Handle:
    """A handler that changes its carry and attaches evidence before it ends."""

    def change(task: Running, ctx: Context[State]) -> t.Any:
        ctx.carry.number = 5
        ctx.attach(seen=True)
        return handle()

    return change


def raising(error: BaseException | type[BaseException]) -> Handle:
    def handle() -> None:
        raise error

    return changing(handle)


RETURNED: dict[str, tuple[object, str, str | None]] = {
    "nothing": (None, "completed", None),
    "completed": (Completed(), "completed", None),
    "completed with a note": (Completed("all read"), "completed", "all read"),
    "a pause": (Pause(), "paused", None),
    "a pause of nothing": (Pause(dt.timedelta(0)), "paused", None),
    "a pause with a note": (Pause(dt.timedelta(seconds=5), "more"), "paused", "more"),
}


@pytest.fixture
def schema(emptied: str) -> str:
    """One schema for all tests here, emptied after each."""
    return emptied


@pytest.mark.conformance(26)
@pytest.mark.parametrize(("value", "outcome", "note"), RETURNED.values(), ids=RETURNED)
def test_what_a_handler_returns_is_its_outcome(
    queue: venturi.Queue, value: t.Any, outcome: str, note: str | None
) -> None:
    """With its note or none; a pause is due when it says."""
    queue.handler(task=Running)(lambda task, ctx: value if ctx.run_count == 1 else Pause(dt.timedelta(1)))
    receipt = queue.enqueue(Running())
    with working(queue, concurrency=1):
        entry = eventually(lambda: queue.journal(receipt.id))[0]
    assert (entry.outcome, entry.note, entry.traceback) == (outcome, note, None)
    if isinstance(value, Pause) and value.resume_in:
        job = queue.job(receipt.id)
        assert job is not None
        assert job.visible_at == entry.recorded_at + dt.timedelta(seconds=5)


@pytest.mark.conformance(26, 27)
@pytest.mark.parametrize("delay", [dt.timedelta(0), dt.timedelta(-5), dt.timedelta.min])
@pytest.mark.parametrize("kind", ["paused", "retried"])
def test_no_delay_or_a_negative_one_is_due_at_once(queue: venturi.Queue, delay: dt.timedelta, kind: str) -> None:
    """The next run follows without waiting for anything (cases 081, 084)."""

    def handle(task: Running, ctx: Context[State]) -> venturi.Outcome:
        if ctx.run_count > 1:
            return None
        if kind == "retried":
            raise RetryLater(delay)
        return Pause(delay)

    handled(queue, handle, kind, "completed", poll=60)


@pytest.mark.conformance(27)
@pytest.mark.parametrize("end", [Pause(dt.timedelta.max), RetryLater(dt.timedelta.max)], ids=["pause", "retry"])
def test_a_delay_beyond_the_end_of_time_stops_there(queue: venturi.Queue, end: t.Any) -> None:
    """Not at now, and the row can be read (case 084)."""

    def handle(task: Running, ctx: Context[State]) -> venturi.Outcome:
        if isinstance(end, Exception):
            raise end
        return t.cast(Pause, end)

    job, _ = handled(queue, handle, "paused" if isinstance(end, Pause) else "retried")
    assert job.visible_at == FAR


class Foreign(dt.timedelta):
    """A span as other libraries make it: it can be divided by its own kind only."""

    def __floordiv__(self, other: object) -> t.NoReturn:
        raise AttributeError("no kind of mine")


@pytest.mark.parametrize("way", ["pause", "retry", "curve"])
def test_a_delay_may_be_of_a_subclass(queue: venturi.Queue, way: str) -> None:
    """As those of pendulum: it counts for what it is, in a pause, an error and a curve (case 084)."""

    @venturi.task("waiting", backoff=Backoff(Foreign(minutes=5), Foreign(hours=1)))
    class Waiting:
        pass

    @queue.handler(task=Waiting)
    def handle(_: Waiting) -> venturi.Outcome:
        if way == "pause":
            return Pause(Foreign(minutes=5))
        raise RetryLater(Foreign(minutes=5)) if way == "retry" else ValueError("no")

    receipt = queue.enqueue(Waiting(), delay=Foreign(0))
    with working(queue, concurrency=1, jitter=0):
        (entry,) = until(queue, receipt.id, "paused" if way == "pause" else "retried")
    job = queue.job(receipt.id)
    assert job is not None
    assert job.visible_at is not None
    assert job.visible_at - entry.recorded_at == dt.timedelta(minutes=5)


class Silent(Exception):
    """An error without a text."""


class Unprintable(Exception):
    """An error whose text cannot be had."""

    def __str__(self) -> str:
        raise ValueError("no text")


class Wilful(str):
    """A text that is not to be measured."""

    __slots__ = ()

    def __len__(self) -> int:
        raise ValueError("no length")


class Quoting(Exception):
    """An error whose text is a wilful one."""

    def __str__(self) -> str:
        return Wilful("own text")


class Nameless(type):
    """Makes classes whose name cannot be had."""

    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise ValueError("no name")


class Secretive(Exception, metaclass=Nameless):
    """An error without a name."""


FAILURES: dict[str, tuple[BaseException | type[BaseException], str]] = {
    "with a text": (ValueError("bad feed"), "ValueError: bad feed"),
    "a class": (KeyError, "KeyError"),
    "without a text": (Silent(), "Silent"),
    "of several lines": (ValueError("one\ntwo"), "ValueError: one\ntwo"),
    "unprintable": (Unprintable(), "Unprintable: <text of Unprintable cannot be rendered: ValueError>"),
    "with a text of its own kind": (Quoting(), "Quoting: own text"),
    "without a name": (Secretive("x"), "a nameless class: x"),
    "with NUL": (ValueError("a\0b\ud800"), "ValueError: a\\u0000b\\ud800"),
    "a group": (ExceptionGroup("many", [ValueError("x")] * 1000), "ExceptionGroup: many (1000 sub-exceptions)"),
    "cancelled, though not told": (venturi.Cancelled("shutdown"), "Cancelled: the run was told to stop: shutdown"),
}


@pytest.mark.conformance(28, 34)
@pytest.mark.parametrize(("error", "note"), FAILURES.values(), ids=FAILURES)
def test_any_exception_is_a_failure_to_be_retried(
    queue: venturi.Queue, error: BaseException | type[BaseException], note: str
) -> None:
    """Its note is type and text in one; the carry as the run left it, and its evidence, are kept (cases 014, 016)."""
    queue.handler(task=Running)(raising(error))
    receipt = queue.enqueue(Running())
    with working(queue, concurrency=1, poll=0.1):
        entry = eventually(lambda: queue.journal(receipt.id))[0]
    job = queue.job(receipt.id)
    assert job is not None
    assert (entry.outcome, entry.note, entry.failure_count, entry.evidence) == ("retried", note, 1, {"seen": True})
    assert job.carry == {"number": 5}


@pytest.mark.conformance(29)
def test_the_traceback_is_kept_with_its_causes(queue: venturi.Queue) -> None:
    """Beside the one-line note, with the lines of the code and what it was raised from."""

    def handle(task: Running, ctx: Context[State]) -> None:
        try:
            raise LookupError("the cause")
        except LookupError as error:
            raise ValueError("the error") from error

    _, entry = handled(queue, handle, "dead", backstop=1)
    assert entry.note == "ValueError: the error"
    assert entry.traceback is not None
    assert entry.traceback.index("LookupError: the cause") < entry.traceback.index("direct cause")
    assert entry.traceback.rstrip().endswith("ValueError: the error")
    assert 'raise LookupError("the cause")' in entry.traceback


def recursing() -> None:
    recursing()


def chained() -> None:
    error = ValueError("0")
    for n in range(300):
        after = ValueError(f"{n} {'x' * 1000}")
        after.__cause__ = error
        error = after
    raise error


def huge() -> None:
    raise ValueError("x" * 50_000_000 + "end")


@pytest.mark.conformance(29)
@pytest.mark.parametrize("fail", [recursing, chained, huge], ids=["recursion", "300 causes", "50 MB"])
def test_a_huge_error_is_cut_and_changes_nothing(queue: venturi.Queue, fail: t.Callable[[], None]) -> None:
    """The last 16 KiB of the traceback and 8 KiB of the note are stored, and the outcome with them (case 016)."""
    _, entry = handled(queue, changing(fail), "dead", backstop=1)
    assert entry.traceback is not None
    assert entry.note is not None
    assert 100 < len(entry.traceback.encode()) <= 16 * 1024
    assert len(entry.note.encode()) <= 8 * 1024
    if fail is huge:
        assert entry.note.startswith("ValueError: xxx")
        assert entry.note.endswith("xend")
        assert "[...]" in entry.note


def test_a_failed_run_leaves_nothing_in_memory(queue: venturi.Queue) -> None:
    """Neither its exception nor the objects of its frames outlive it (case 018)."""
    alive: list[weakref.ref[object]] = []

    class Big:
        pass

    class Error(Exception):
        pass

    def handle(task: Running, ctx: Context[State]) -> None:
        local = Big()
        error = Error("no")
        alive.extend([weakref.ref(local), weakref.ref(error), weakref.ref(ctx)])
        try:
            raise error
        finally:
            del error

    queue.handler(task=Running)(handle)
    receipt = queue.enqueue(Running())
    with working(queue, concurrency=1, backstop=3, poll=0.02):
        ended(queue, receipt.id, "dead")
        eventually(lambda: gc.collect() >= 0 and not any(ref() for ref in alive), what="nothing is alive")
    assert len(alive) == 9


@pytest.mark.conformance(30)
def test_retry_later_waits_exactly_as_long_as_it_says(queue: venturi.Queue) -> None:
    """Without curve and jitter, and it counts as a failure."""
    handle = raising(RetryLater(dt.timedelta(minutes=7), "the feed is closed"))
    job, entry = handled(queue, handle, "retried", jitter=1)
    assert job.visible_at is not None
    assert job.visible_at - entry.recorded_at == dt.timedelta(seconds=420)
    assert (job.failure_count, job.carry) == (1, {"number": 5})
    assert "the feed is closed" in (entry.note or "")


@pytest.mark.conformance(30)
def test_retry_later_counts_toward_the_backstop(queue: venturi.Queue) -> None:
    """The second of two failures ends the job, whatever delay it asks for."""
    job, _ = handled(queue, raising(RetryLater(dt.timedelta(0))), "retried", "dead", backstop=2, poll=0.02)
    assert job.failure_count == 2


@pytest.mark.conformance(31)
@pytest.mark.parametrize("backstop", [None, 25])
def test_a_permanent_error_ends_the_job_dead_at_once(queue: venturi.Queue, backstop: int | None) -> None:
    """On its first failure, with its text as the note."""
    job, entry = handled(queue, raising(PermanentError("the feed is gone")), "dead", backstop=backstop)
    assert (job.status, job.failure_count, entry.note) == ("dead", 1, "the feed is gone")
    assert entry.evidence == {"seen": True}


class Special(ValueError):
    pass


@pytest.mark.conformance(23)
@pytest.mark.parametrize(
    ("error", "outcome"), [(ValueError("x"), "dead"), (Special("x"), "dead"), (KeyError("x"), "retried")]
)
def test_errors_that_never_succeed_end_the_job_dead(queue: venturi.Queue, error: Exception, outcome: str) -> None:
    """dead_on holds for its classes and their subclasses; another exception is retried."""

    def handle(task: Running, ctx: Context[State]) -> None:
        if ctx.run_count == 1:
            raise error

    queue.handler(task=Running, dead_on=(ValueError, OSError))(handle)
    receipt = queue.enqueue(Running())
    with working(queue, concurrency=1, poll=0.02):
        assert eventually(lambda: queue.journal(receipt.id))[0].outcome == outcome


async def coroutine() -> None:
    pass


def generator() -> t.Iterator[int]:
    yield 1


def future() -> asyncio.Future[None]:
    loop = asyncio.new_event_loop()
    made = loop.create_future()
    loop.close()
    return made


WRONG: dict[str, tuple[t.Callable[[], t.Any], str]] = {
    "a number": (lambda: 42, "type int"),
    "a text": (lambda: "ok", "type str"),
    "true": (lambda: True, "type bool"),
    "a class": (lambda: Completed, "the class Completed"),
    "an awaitable": (coroutine, "type coroutine"),
    "a generator": (generator, "type generator"),
    "a future": (future, "type Future"),
}


@pytest.mark.conformance(32)
@pytest.mark.parametrize(("handle", "named"), WRONG.values(), ids=WRONG)
def test_a_wrong_return_is_a_failure_that_names_it(
    queue: venturi.Queue, handle: t.Callable[[], t.Any], named: str
) -> None:
    """The carry stays as before the run, the evidence is kept, and the job is retried."""
    queue.handler(task=Running)(changing(handle))
    receipt = queue.enqueue(Running())
    with working(queue, concurrency=1, poll=0.1):
        entry = eventually(lambda: queue.journal(receipt.id))[0]
    job = queue.job(receipt.id)
    assert job is not None
    assert (entry.outcome, entry.evidence, job.carry) == ("retried", {"seen": True}, None)
    assert named in (entry.note or "")


@pytest.mark.conformance(32)
@pytest.mark.parametrize("delay", [5, True, math.nan, math.inf, "5", dt.datetime(2020, 1, 1)])
def test_a_delay_that_is_a_number_is_refused_where_it_is_given(delay: t.Any) -> None:
    """So that the traceback shows the line, and in words that a journal may show (case 084)."""
    told = f"must be a timedelta, not {type(delay).__name__}$"
    with pytest.raises(TypeError, match=f"^resume_in {told}"):
        Pause(delay)
    with pytest.raises(TypeError, match=f"^delay {told}"):
        RetryLater(delay)
    with pytest.raises(TypeError, match=f"^delay {told}"):
        venturi.Replace(delay)
    with pytest.raises(TypeError, match=f"^delay {told}"):
        venturi.Combine(Running(), delay=delay)


@pytest.mark.conformance(32)
def test_a_pause_of_none_is_refused() -> None:
    """None is no delay where zero is the default (case 084)."""
    with pytest.raises(TypeError, match="resume_in must be a timedelta, not NoneType"):
        Pause(t.cast(dt.timedelta, None))


class Own(BaseException):
    pass


BASE: dict[str, tuple[BaseException, str]] = {
    "exit": (SystemExit(1), "SystemExit: 1"),
    "exit without fault": (SystemExit(0), "SystemExit: 0"),
    "interrupt": (KeyboardInterrupt("x"), "KeyboardInterrupt: x"),
    "generator exit": (GeneratorExit(), "GeneratorExit"),
    "asyncio": (asyncio.CancelledError(), "CancelledError"),
    "own": (Own("mine"), "Own: mine"),
}


@pytest.mark.conformance(33)
@pytest.mark.parametrize(("error", "note"), BASE.values(), ids=BASE)
def test_a_base_exception_is_a_failure_and_the_slot_lives_on(
    queue: venturi.Queue, error: BaseException, note: str
) -> None:
    """Type and text are the note, carry is from before, evidence is kept; the same slot runs the next jobs.

    Case 021.
    """
    threads: set[str] = set()

    @venturi.task("normal")
    class Normal:
        pass

    def fail(task: Running, ctx: Context[State]) -> None:
        threads.add(threading.current_thread().name)
        ctx.carry.number = 5
        ctx.attach(seen=True)
        raise error

    queue.handler(task=Running)(fail)
    queue.handler(task=Normal)(lambda task: threads.add(threading.current_thread().name))
    first = queue.enqueue(Running())
    others = queue.enqueue_many([Normal()] * 10)
    with working(queue, concurrency=1, backstop=1):
        for other in others:
            ended(queue, other.id)
        (entry,) = until(queue, first.id, "dead")
    assert (entry.note, entry.evidence) == (note, {"seen": True})
    assert len(threads) == 1


@pytest.mark.conformance(33)
def test_a_base_exception_keeps_the_carry_from_before(queue: venturi.Queue) -> None:
    """What the run stored on its last pause is what the next one begins with."""
    seen: list[int] = []

    def handle(task: Running, ctx: Context[State]) -> venturi.Outcome:
        seen.append(ctx.carry.number)
        ctx.carry.number += 1
        if ctx.run_count == 1:
            return Pause()
        if ctx.run_count == 2:
            sys.exit(3)
        return None

    handled(queue, handle, "paused", "retried", "completed", poll=0.02)
    assert seen == [0, 1, 1]
