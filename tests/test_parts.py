"""The worker's own threads: an error of ours once is survived, and for good ends the worker loudly."""

from __future__ import annotations

import collections.abc as cabc
import datetime as dt
import logging
import threading
import typing as t

import pytest
from fixtures.stubborn import stopped
from fixtures.waiting import eventually
from fixtures.work import ended, until, working
from psycopg import sql

import venturi
from venturi.store import connections, migrate
from venturi.worker.coordinator import Coordinator
from venturi.worker.listener import Listener
from venturi.worker.maintainer import Maintainer
from venturi.worker.outages import Retry

STEPS: dict[str, tuple[type, str]] = {
    "coordinator": (Coordinator, "_turn"),
    "listener": (Listener, "_step"),
    "maintainer": (Maintainer, "_step"),
}
parts = pytest.mark.parametrize("part", STEPS)


@pytest.fixture
def schema(emptied: str) -> str:
    """All tests here are content with one schema, emptied in between."""
    return emptied


@venturi.task("work")
class Work:
    wait: bool = False


@pytest.fixture
def began(queue: venturi.Queue) -> threading.Event:
    """Set when a job that waits to be told to stop has begun."""
    began = threading.Event()

    @queue.handler
    def handle(task: Work, ctx: venturi.Context) -> None:
        if task.wait:
            began.set()
            ctx.cancelled.wait(10)

    return began


class Sabotage:
    """Makes the steps of a part fail.

    Attributes:
        left: How many of the next steps fail.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, part: str, error: Exception) -> None:
        self.left = 0
        owner, name = STEPS[part]
        step = getattr(owner, name)

        def at_once(this: Retry) -> float:
            return 0.001

        def failing(this: t.Any) -> None:
            if self.left:
                self.left -= 1
                raise error
            step(this)

        monkeypatch.setattr(owner, name, failing)
        monkeypatch.setattr(Retry, "wait", at_once)


@parts
@pytest.mark.parametrize(
    "error", [TypeError("slip"), MemoryError(), AttributeError("slip")], ids=lambda error: type(error).__name__
)
def test_a_part_that_fails_once_goes_on(
    queue: venturi.Queue, began: threading.Event, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, part: str, error: Exception,
) -> None:  # fmt: skip
    """It logs what it met, with its traceback, and works as before (case 125)."""
    sabotage = Sabotage(monkeypatch, part, error)
    with working(queue, poll=0.05, lease=1) as worker:
        ended(queue, queue.enqueue(Work()).id)
        sabotage.left = 1
        eventually(lambda: sabotage.left == 0)
        ended(queue, queue.enqueue(Work()).id)
        worker.stop()
        assert stopped(worker) == venturi.Report(2)
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert part in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[1] is error


@parts
def test_a_part_that_fails_for_good_ends_the_worker(
    queue: venturi.Queue, began: threading.Event, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """What runs is told to stop and the error is raised to whoever waits for the worker (case 125)."""
    sabotage = Sabotage(monkeypatch, part, RuntimeError("for good"))
    worker = queue.work(block=False, concurrency=2, poll=0.05, lease=1)
    job = queue.enqueue(Work(wait=True)).id
    assert began.wait(5)
    sabotage.left = 10**6
    with pytest.raises(RuntimeError, match="for good"):
        worker.join(5)
    worker.stop()
    worker.stop(0)
    with pytest.raises(RuntimeError, match="for good"), worker:
        pass
    sabotage.left = 0
    if part != "coordinator":
        until(queue, job, "completed")


def test_a_worker_that_is_started_again_is_only_waited_for(queue: venturi.Queue, began: threading.Event) -> None:
    """Whoever calls run() or start() on a worker that has begun, or has ended, gets no second loop (case 130)."""
    with working(queue) as worker:
        assert worker.start() is worker
        ended(queue, queue.enqueue(Work()).id)
        reports = list[venturi.Report]()
        waiting = threading.Thread(target=lambda: reports.append(worker.run()))
        waiting.start()
        assert worker.join(0) is None
        names = [thread.name for thread in threading.enumerate()]
        assert [names.count(f"venturi-{part}") for part in STEPS] == [1, 1, 1]
        worker.stop()
        waiting.join(5)
    assert reports == [venturi.Report(1)]
    assert worker.run() is worker.join(dt.timedelta(days=999_999_999)) is reports[0]


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf"), True, "5"])
def test_a_wait_that_is_no_time_is_refused(queue: venturi.Queue, began: threading.Event, timeout: t.Any) -> None:
    """The worker goes on (case 174)."""
    with working(queue) as worker:
        with pytest.raises(venturi.ConfigError, match="timeout="):
            worker.join(timeout)
        ended(queue, queue.enqueue(Work()).id)


def test_a_worker_that_could_not_start_leaves_nothing_and_the_next_one_works(dsn: str) -> None:
    """The schema is missing, and then it is not (case 130)."""
    name = "made_later"
    queue: venturi.Queue = venturi.Queue(name, dsn=dsn)
    queue.handler(task=Work)(lambda task: None)
    before = set(threading.enumerate())
    for block in (True, False):
        with pytest.raises(venturi.SchemaError):
            queue.work(block=t.cast(t.Any, block))
    eventually(lambda: set(threading.enumerate()) <= before)
    try:
        migrate.migrate(dsn, name)
        with working(queue):
            ended(queue, queue.enqueue(Work()).id)
    finally:
        queue.close()
        with connections.connect(dsn, name="venturi test") as connection:
            connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(name)))


@pytest.fixture
def few(schema: str, monkeypatch: pytest.MonkeyPatch) -> cabc.Callable[[int], None]:
    """Sets how many threads for handlers the machine has."""
    start = threading.Thread.start
    most = 0

    def begin(thread: threading.Thread) -> None:
        running = sum(each.name.startswith(f"venturi-{schema}") for each in threading.enumerate())
        if thread.name.startswith(f"venturi-{schema}") and running >= most:
            raise RuntimeError("can't start new thread")
        start(thread)

    def limit(number: int) -> None:
        nonlocal most
        most = number

    monkeypatch.setattr(threading.Thread, "start", begin)
    return limit


def test_a_worker_with_fewer_threads_than_slots_runs_all_jobs(
    queue: venturi.Queue, began: threading.Event, few: cabc.Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Where the machine gives no more threads, those that there are run all jobs, and one line says so."""
    few(2)
    jobs = [receipt.id for receipt in queue.enqueue_many([Work()] * 20)]
    with working(queue, concurrency=4) as worker:
        for job in jobs:
            ended(queue, job)
        worker.stop()
        assert stopped(worker) == venturi.Report(20)
    assert [record.getMessage() for record in caplog.records if "slots" in record.getMessage()] == [
        "no more than 2 of 4 slots can be used: no thread can be started"
    ]


def test_a_worker_without_a_thread_for_handlers_ends_at_once(
    queue: venturi.Queue, began: threading.Event, few: cabc.Callable[[int], None]
) -> None:
    """It claims nothing that it could not run, and raises what kept it from starting."""
    few(0)
    queue.enqueue(Work())
    worker = queue.work(block=False)
    with pytest.raises(RuntimeError, match="new thread"):
        worker.join(5)
    assert queue.stats().kinds["work"].ready == 1
