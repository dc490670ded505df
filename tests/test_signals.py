"""Stops that come from outside: signals, Ctrl-C, and a main thread that ends."""

from __future__ import annotations

import collections.abc as cabc
import os
import signal
import threading
import time
import typing as t

import psycopg
import pytest
from fixtures.program import Programs
from fixtures.sqltext import on
from fixtures.stubborn import Handlers, Work
from fixtures.waiting import eventually
from fixtures.work import until

import venturi
from venturi.worker import worker as module

Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[t.Any]]

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture
def schema(emptied: str) -> str:
    """All tests here are content with one schema, emptied in between."""
    return emptied


class Steps(Handlers):
    """Handlers that are told to stop by what a second thread does while the main thread works."""

    def kill(self, *numbers: signal.Signals) -> threading.Thread:
        """Send this process the signals, 0.2 s apart, as soon as a handler has begun."""

        def kill() -> None:
            self.began.acquire(timeout=5)
            for number in numbers:
                os.kill(os.getpid(), number)
                time.sleep(0.2)

        thread = threading.Thread(target=kill)
        thread.start()
        return thread


@pytest.fixture
def steps(queue: venturi.Queue) -> cabc.Iterator[Steps]:
    steps = Steps(queue)
    yield steps
    steps.go.set()


@pytest.mark.conformance(193)
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_an_orderly_stop_on_the_main_thread(
    queue: venturi.Queue, steps: Steps, number: signal.Signals
) -> None:
    """The handler ends as it likes, work() returns its report, and the signals' handlers are what they were.

    Case 126.
    """
    before = [signal.getsignal(each) for each in SIGNALS]
    running = queue.enqueue(Work()).id
    thread = steps.kill(number)
    assert queue.work() == venturi.Report(settled=1)
    thread.join()
    assert [signal.getsignal(each) for each in SIGNALS] == before
    (entry,) = queue.journal(running)
    assert (entry.outcome, entry.note) == ("completed", "shutdown")


@pytest.mark.conformance(193)
def test_a_second_signal_releases_at_once(queue: venturi.Queue, steps: Steps) -> None:
    """Whichever of the two it is, and a third one changes nothing (case 127)."""
    running = queue.enqueue(Work("ignore")).id
    thread = steps.kill(signal.SIGTERM, signal.SIGINT, signal.SIGTERM)
    began = time.monotonic()
    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        report = queue.work(shutdown_timeout=30)
        assert time.monotonic() - began < 3
        thread.join()
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert [released.id for released in report.released] == [running]
    until(queue, running, "released")


@pytest.mark.conformance(193)
@pytest.mark.parametrize("options", [{"signals": False}, {}], ids=["signals=False", "other thread"])
def test_no_signal_is_touched_otherwise(queue: venturi.Queue, steps: Steps, options: dict[str, bool]) -> None:
    """Not with signals=False, and not off the main thread, where work() runs just as well (case 132)."""
    heard = list[int]()

    def hear(number: int, frame: object) -> None:
        heard.append(number)

    previous = signal.signal(signal.SIGTERM, hear)
    stop, reports = threading.Event(), list[venturi.Report]()
    try:
        queue.enqueue(Work())
        if options:
            thread = steps.kill(signal.SIGTERM)
            threading.Timer(0.4, stop.set).start()
            reports.append(queue.work(stop=stop, signals=False))
        else:
            thread = threading.Thread(target=lambda: reports.append(queue.work(stop=stop)))
            thread.start()
            assert steps.began.acquire(timeout=5)
            os.kill(os.getpid(), signal.SIGTERM)
            eventually(lambda: heard)
            assert thread.is_alive()
            stop.set()
        thread.join(5)
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert heard == [signal.SIGTERM]
    assert reports == [venturi.Report(settled=1)]


@pytest.mark.conformance(194)
def test_ctrl_c_is_an_orderly_stop_that_is_raised_again_at_its_end(queue: venturi.Queue, steps: Steps) -> None:
    """With signals=False the KeyboardInterrupt reaches the caller when the handler has been settled (case 021)."""
    running = queue.enqueue(Work()).id
    thread = steps.kill(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        queue.work(signals=False)
    thread.join()
    until(queue, running, "completed")


@pytest.mark.conformance(194)
def test_a_second_ctrl_c_releases_at_once(queue: venturi.Queue, steps: Steps) -> None:
    """The first one waits for the handler for up to thirty seconds (case 127)."""
    running = queue.enqueue(Work("ignore")).id
    thread = steps.kill(signal.SIGINT, signal.SIGINT)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        queue.work(signals=False)
    assert time.monotonic() - began < 3
    thread.join()
    until(queue, running, "released")


BUSY = """
@venturi.task("work")
class Work:
    end: str = "return"

@queue.handler
def handle(task: Work) -> None:
    pass

def begun():
    while queue.stats().workers == 0:
        time.sleep(0.01)
    say("working")

threading.Thread(target=begun).start()
try:
    report = queue.work(concurrency=4, signals={signals})
except KeyboardInterrupt:
    say("interrupted")
else:
    say("report", len(report.released), len(report.unsettled))
"""


@pytest.mark.conformance(191, 193, 194)
@pytest.mark.parametrize("signals", [True, False], ids=["signal", "KeyboardInterrupt"])
def test_a_busy_worker_that_is_interrupted_leaves_no_claim_behind(
    queue: venturi.Queue, program: Programs, connect: Connect, signals: bool
) -> None:
    """Whatever the worker is doing at that moment, be it to wait for the answer to a claim (case 128)."""
    queue.enqueue_many([Work() for _ in range(20_000)])
    with connect(autocommit=True) as connection:
        for attempt in range(3):
            worker = program(BUSY.format(signals=signals))
            worker.hears("working")
            time.sleep(0.05 * attempt)
            worker.send(signal.SIGINT)
            assert worker.hears("interrupted" if not signals else "report") in ("", "0 0")
            assert worker.ends() == 0
            claimed = connection.execute(on(queue.schema, "SELECT count(*) FROM {schema}.live WHERE owner IS NOT NULL"))
            assert claimed.fetchone() == (0,)
            assert connection.execute(on(queue.schema, "SELECT count(*) FROM {schema}.workers")).fetchone() == (0,)
        assert connection.execute(on(queue.schema, "SELECT count(*) FROM {schema}.live")).fetchone() != (0,)


LEFT_RUNNING = """
@venturi.task("work")
class Work:
    end: str = "return"

@queue.handler
def handle(task: Work, ctx: venturi.Context) -> None:
    say("began")
    ctx.cancelled.wait(0.05 if task.end == "quick" else 60)
    if task.end == "ignore":
        time.sleep(1.5)
    say("told", ctx.cancelled.reason)

worker = queue.work(block=False, concurrency=2, shutdown_timeout={timeout})
while queue.stats().workers == 0:
    time.sleep(0.01)
say("ready")
while {wait} and not sys.stdin.readline():
    pass
for line in range({jobs}):
    queue.enqueue(Work({end!r}))
time.sleep(0.3)
say("returns")
"""


@pytest.mark.conformance(190, 191)
@pytest.mark.parametrize("end", ["return", "quick"])
def test_a_script_that_returns_from_its_main_thread_exits_by_itself(
    queue: venturi.Queue, program: Programs, connect: Connect, end: str
) -> None:
    """A running handler is told and settled, an idle worker just ends; neither leaves a claim or a row behind.

    Case 137.
    """
    script = program(LEFT_RUNNING.format(timeout=30, wait=False, jobs=1, end=end))
    script.hears("returns")
    assert script.ends(5) == 0
    assert [job.status for job in queue.jobs()] == ["completed"]
    with connect(autocommit=True) as connection:
        assert connection.execute(on(queue.schema, "SELECT count(*) FROM {schema}.workers")).fetchone() == (0,)


@pytest.mark.conformance(190, 191)
def test_such_a_script_releases_at_the_deadline_what_does_not_end(queue: venturi.Queue, program: Programs) -> None:
    """Its job is pending again when the deadline is over, although the thread goes on (case 137)."""
    script = program(LEFT_RUNNING.format(timeout=0.2, wait=False, jobs=1, end="ignore"))
    script.hears("returns")
    eventually(lambda: [job.status for job in queue.jobs()] == ["pending"], 1.4)
    assert script.ends(5) == 0
    (job,) = queue.jobs()
    assert [entry.outcome for entry in queue.journal(job.id)] == ["released"]


@pytest.mark.conformance(191)
def test_a_killed_worker_s_job_is_not_lost(queue: venturi.Queue, program: Programs) -> None:
    """After SIGKILL its claim stands until another worker recovers it."""
    script = program(LEFT_RUNNING.format(timeout=30, wait=False, jobs=1, end="return"))
    script.hears("began")
    script.send(signal.SIGKILL)
    assert script.ends() == -signal.SIGKILL
    (job,) = queue.jobs()
    assert (job.status, job.run_count) == ("claimed", 1)


def test_a_forked_child_does_not_wait_for_its_parent_s_workers(program: Programs) -> None:
    """It ends as soon as its own code does, and the parent's worker goes on."""
    script = program(
        """
        @venturi.task("work")
        class Work:
            pass

        @queue.handler
        def handle(task: Work) -> None:
            say("ran")

        with queue.work(block=False, poll=0.05):
            while queue.stats().workers == 0:
                time.sleep(0.01)
            if os.fork() == 0:
                threading._shutdown()
                os._exit(7)
            say("child", os.waitstatus_to_exitcode(os.wait()[1]))
            queue.enqueue(Work())
            time.sleep(0.3)
        queue.close()
        """
    )
    assert script.hears("child", timeout=8) == "7"
    script.hears("ran")
    assert script.ends() == 0


def test_a_forked_child_can_tell_a_run_though_another_thread_was_telling_one(program: Programs) -> None:
    """The lock that was taken at the fork has nobody in the child who would let it go (case 137)."""
    script = program(
        """
        import math
        from venturi import context

        with context._telling:
            if os.fork() == 0:
                signal.alarm(3)
                context.RunSignal(math.inf).tell("shutdown")
                os._exit(7)
        say("child", os.waitstatus_to_exitcode(os.wait()[1]))
        """
    )
    assert script.hears("child", timeout=8) == "7"
    assert script.ends() == 0


def test_the_end_of_the_main_thread_stands_workers_that_end_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """They leave the set of all workers while it is looked through (case 137)."""

    class Ending:
        def _is_here(self) -> bool:
            running.discard(self)
            return False

    running = {Ending() for _ in range(3)}
    monkeypatch.setattr(module, "_running", running)
    monkeypatch.setattr(module, "_ending", threading.Event())
    module._stop_all()  # pyright: ignore[reportPrivateUsage]
    assert running == set()
