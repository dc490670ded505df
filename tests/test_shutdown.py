"""The orderly stop: what it tells, what it waits for, what it gives back, and that it always comes to an end."""

from __future__ import annotations

import collections.abc as cabc
import datetime as dt
import logging
import threading
import time
import typing as t
import uuid

import psycopg
import pytest
from fixtures.serverlog import ServerLog
from fixtures.sqltext import on
from fixtures.stubborn import Handlers, Work, stopped
from fixtures.waiting import eventually
from fixtures.work import ended, until, working

import venturi
from venturi.store.claiming import Claiming, Turn
from venturi.worker import Worker

Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[t.Any]]


@pytest.fixture
def schema(emptied: str) -> str:
    """All tests here are content with one schema, emptied in between."""
    return emptied


@pytest.fixture
def handlers(queue: venturi.Queue) -> cabc.Iterator[Handlers]:
    handlers = Handlers(queue)
    yield handlers
    handlers.go.set()


def job(queue: venturi.Queue, id: uuid.UUID) -> venturi.Job:
    found = queue.job(id)
    assert found is not None
    return found


@pytest.mark.conformance(182)
def test_a_stop_may_come_from_anywhere_and_any_number_of_times(queue: venturi.Queue, handlers: Handlers) -> None:
    """From many threads and again afterwards; a job that comes then is left alone (case 127)."""
    with working(queue) as worker:
        running = queue.enqueue(Work()).id
        handlers.await_begun(1)
        threads = [threading.Thread(target=worker.stop) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        late = queue.enqueue(Work()).id
        report = stopped(worker)
        worker.stop()
        worker.stop(0)
        assert worker.join() is report
    assert (report.released, report.unsettled) == ((), ())
    assert (job(queue, running).status, job(queue, late).status) == ("completed", "pending")
    assert not handlers.began.acquire(blocking=False)


@pytest.mark.conformance(182)
def test_a_handler_may_stop_its_own_worker(queue: venturi.Queue) -> None:
    """It ends as it would, and the jobs behind it stay pending (case 127)."""

    @queue.handler
    def handle(task: Work) -> None:
        worker.stop()

    with queue.work(block=False, concurrency=1) as worker:
        first, second = [receipt.id for receipt in queue.enqueue_many([Work(), Work()])]
        assert stopped(worker).settled == 1
    assert (job(queue, first).status, job(queue, second).run_count) == ("completed", 0)


@pytest.mark.conformance(182)
def test_a_worker_that_was_stopped_before_its_start_claims_nothing(queue: venturi.Queue, handlers: Handlers) -> None:
    """It returns an empty report at once."""
    pending = queue.enqueue(Work()).id
    worker = Worker(queue, signals=False)
    worker.stop()
    began = time.monotonic()
    assert worker.run() == venturi.Report(settled=0)
    assert time.monotonic() - began < 1
    assert job(queue, pending).run_count == 0


@pytest.mark.conformance(183, 187, 189)
@pytest.mark.parametrize(
    ("end", "outcome", "note"),
    [
        ("return", "completed", "shutdown"),
        ("pause", "paused", "shutdown"),
        ("fail", "retried", "RuntimeError: in the drain"),
        ("check", "released", "the run was told to stop: shutdown"),
    ],
)
def test_a_handler_that_heeds_the_stop_is_settled_by_what_it_did(
    queue: venturi.Queue, handlers: Handlers, end: str, outcome: str, note: str
) -> None:
    """Exactly that entry, and none that says released unless it gave way itself (case 126)."""
    with working(queue) as worker:
        running = queue.enqueue(Work(end)).id
        handlers.await_begun(1)
        worker.stop()
        assert stopped(worker) == venturi.Report(settled=1)
    (entry,) = queue.journal(running)
    assert (entry.outcome, entry.note) == (outcome, note)
    assert entry.failure_count == (outcome == "retried")
    assert job(queue, running).status == ("completed" if outcome == "completed" else "pending")


@pytest.mark.conformance(184, 189, 190)
def test_a_handler_that_ignores_the_stop_loses_its_claim_at_the_deadline(
    queue: venturi.Queue, handlers: Handlers, caplog: pytest.LogCaptureFixture
) -> None:
    """work() returns; the job is pending with no failure; report and log name job, kind and thread (cases 025, 140)."""
    worker = queue.work(block=False, shutdown_timeout=0.2)
    stubborn = queue.enqueue(Work("ignore")).id
    handlers.await_begun(1)
    began = time.monotonic()
    worker.stop()
    report = stopped(worker, 2)
    assert 0.2 <= time.monotonic() - began < 2
    (released,) = report.released
    assert (released.id, released.kind) == (stubborn, "work")
    assert released.thread in {thread.name for thread in threading.enumerate()}
    assert (report.settled, report.unsettled) == (0, ())
    (entry,) = queue.journal(stubborn)
    assert (entry.outcome, entry.failure_count) == ("released", 0)
    pending = job(queue, stubborn)
    assert (pending.status, pending.failure_count, pending.owner, pending.lease_until) == ("pending", 0, None, None)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert all(part in line for part in (str(stubborn), "work", released.thread))


@pytest.mark.conformance(185)
def test_ten_stragglers_are_released_at_once_in_one_statement(schema: str, server_log: ServerLog) -> None:
    """With a deadline of 0 nobody is waited for, whatever the ten threads do (case 140)."""
    queue = venturi.Queue(schema, dsn=server_log.dsn)
    handlers = Handlers(queue)
    queue.enqueue_many([Work("ignore")] * 10)
    worker = queue.work(block=False, concurrency=10, shutdown_timeout=0)
    handlers.await_begun(10)
    eventually(lambda: server_log.statements("lanes(kind, priority)"), what="the maintainer's first step is over")
    server_log.clear()
    began = time.monotonic()
    worker.stop()
    report = stopped(worker)
    assert time.monotonic() - began < 1
    assert len(report.released) == len({released.thread for released in report.released}) == 10
    assert len(server_log.statements("buried AS")) == 1
    handlers.go.set()
    assert {found.status for found in queue.jobs()} == {"pending"}
    queue.close()


@pytest.mark.conformance(186)
def test_a_released_job_runs_elsewhere_and_the_late_result_is_refused(
    queue: venturi.Queue, dsn: str, handlers: Handlers, caplog: pytest.LogCaptureFixture
) -> None:
    """Another worker takes it at once; what the straggler returns afterwards is logged and not recorded (case 140)."""
    worker = queue.work(block=False, shutdown_timeout=0)
    released = queue.enqueue(Work("ignore")).id
    handlers.await_begun(1)
    worker.stop()
    stopped(worker)
    other = venturi.Queue(queue.schema, dsn=dsn)

    @other.handler
    def handle(task: Work) -> venturi.Outcome:
        return venturi.Completed("by another")

    with working(other):
        ended(other, released, timeout=1)
    other.close()
    handlers.go.set()
    eventually(lambda: f"{released} of kind work: the result of run 1 is not recorded" in caplog.text)
    assert [(e.outcome, e.note) for e in queue.journal(released)][1:] == [("completed", "by another")]


@pytest.mark.conformance(184, 185)
def test_a_straggler_whose_row_is_locked_at_the_deadline_is_released_a_moment_later(
    queue: venturi.Queue, connect: Connect, handlers: Handlers
) -> None:
    """A renewal may hold the row just then; that must not leave the claim behind."""
    worker = queue.work(block=False, shutdown_timeout=0)
    stubborn = queue.enqueue(Work("ignore")).id
    handlers.await_begun(1)
    with connect() as holder:
        holder.execute(on(queue.schema, "SELECT FROM {schema}.live FOR UPDATE"))
        worker.stop()
        time.sleep(0.3)
        holder.rollback()
    assert [released.id for released in stopped(worker).released] == [stubborn]
    assert job(queue, stubborn).status == "pending"


@pytest.mark.conformance(189, 191)
def test_after_an_orderly_stop_nothing_of_the_worker_is_left(
    queue: venturi.Queue, connect: Connect, handlers: Handlers
) -> None:
    """No claims, no sessions, no row in workers, no thread; the report counts what was settled and is clean."""
    before = set(threading.enumerate())
    with working(queue) as worker:
        jobs = [queue.enqueue(Work()).id for _ in range(2)]
        handlers.await_begun(2)
        eventually(lambda: queue.stats().workers == 1)
        worker.stop()
        assert stopped(worker) == venturi.Report(settled=2)
        with connect(autocommit=True) as connection:
            assert connection.execute(on(queue.schema, "SELECT FROM {schema}.workers")).fetchall() == []
            assert (
                connection.execute(on(queue.schema, "SELECT FROM {schema}.live WHERE owner IS NOT NULL")).fetchall()
                == []
            )
            sessions = "SELECT application_name FROM pg_stat_activity WHERE application_name LIKE 'venturi %'"
            eventually(lambda: {name for (name,) in connection.execute(sessions)} <= {"venturi producer"})
    queue.close()
    eventually(lambda: set(threading.enumerate()) <= before)
    assert {job(queue, id_).status for id_ in jobs} == {"completed"}


@venturi.task("late")
class Late:
    seconds: float


def test_runs_that_end_one_by_one_up_to_the_deadline_are_settled_by_a_slow_database(
    queue: venturi.Queue, connect: Connect
) -> None:
    """The worker's connections are closed after the last of them (case 139)."""
    began = threading.Semaphore(0)

    @queue.handler
    def handle(task: Late, ctx: venturi.Context) -> None:
        began.release()
        ctx.cancelled.wait(10)
        time.sleep(task.seconds)

    with connect(autocommit=True) as connection:
        connection.execute(
            on(
                queue.schema,
                """CREATE FUNCTION {schema}.slow() RETURNS trigger LANGUAGE plpgsql AS
                   $$ BEGIN PERFORM pg_sleep(0.15); RETURN NEW; END $$;
                   CREATE TRIGGER slow BEFORE INSERT ON {schema}.journal FOR EACH STATEMENT
                   EXECUTE FUNCTION {schema}.slow()""",
            )
        )
        try:
            with working(queue, concurrency=8, shutdown_timeout=1) as worker:
                jobs = [receipt.id for receipt in queue.enqueue_many([Late(n / 8) for n in range(8)])]
                for _ in jobs:
                    assert began.acquire(timeout=5)
                worker.stop()
                assert stopped(worker) == venturi.Report(8)
        finally:
            connection.execute(on(queue.schema, "DROP FUNCTION {schema}.slow() CASCADE"))
    assert {job(queue, id_).status for id_ in jobs} == {"completed"}


@pytest.mark.conformance(192)
@pytest.mark.parametrize("how", ["with", "seconds", "timedelta", "event"])
def test_there_are_four_ways_to_the_same_stop(queue: venturi.Queue, handlers: Handlers, how: str) -> None:
    """Leaving the with block, stop() with a deadline of its own in either form, and the event given as stop=."""
    event = threading.Event()
    with queue.work(block=False, stop=event, shutdown_timeout=0.5 if how == "with" else 30) as worker:
        stubborn = queue.enqueue(Work("ignore")).id
        heeding = queue.enqueue(Work("pause")).id if worker.settings.concurrency > 1 else None
        handlers.await_begun(1 if heeding is None else 2)
        began = time.monotonic()
        match how:
            case "seconds":
                worker.stop(0.5)
            case "timedelta":
                worker.stop(dt.timedelta(seconds=0.5))
            case "event":
                event.set()
                time.sleep(0.5)
                worker.stop(0)
            case _:
                pass
    assert 0.5 <= time.monotonic() - began < 1.5
    report = stopped(worker)
    assert [released.id for released in report.released] == [stubborn]
    if heeding is not None:
        assert [entry.outcome for entry in queue.journal(heeding)] == ["paused"]


@pytest.mark.conformance(192)
def test_the_stop_event_alone_stops_a_worker(queue: venturi.Queue, handlers: Handlers) -> None:
    """Also one that blocks a thread of its own (case 132)."""
    event, reports = threading.Event(), list[venturi.Report]()
    thread = threading.Thread(target=lambda: reports.append(queue.work(stop=event)))
    thread.start()
    running = queue.enqueue(Work()).id
    handlers.await_begun(1)
    event.set()
    thread.join(5)
    assert reports == [venturi.Report(settled=1)]
    until(queue, running, "completed")


def test_runs_that_a_stop_came_before_are_no_stragglers(
    queue: venturi.Queue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They came with the answer to a claim, no handler began: all are pending again, and nothing is warned of."""
    turn, ran = Claiming.turn, list[t.Any]()

    def stopping(this: Claiming, *arguments: t.Any) -> Turn:
        answer = turn(this, *arguments)
        if answer.claims:
            worker.stop(0)
        return answer

    monkeypatch.setattr(Claiming, "turn", stopping)
    queue.handler(task=Work)(ran.append)
    jobs = [receipt.id for receipt in queue.enqueue_many([Work()] * 8)]
    worker = Worker(queue, concurrency=8)
    worker.start()
    assert stopped(worker) == venturi.Report(8)
    eventually(lambda: not any(each.name.startswith(f"venturi-{queue.schema}") for each in threading.enumerate()))
    assert [entry.outcome for id_ in jobs for entry in queue.journal(id_)] == ["released"] * 8
    assert ran == []
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_deadline_that_is_no_time_is_refused(queue: venturi.Queue, handlers: Handlers) -> None:
    """The worker goes on."""
    with working(queue) as worker:
        for wrong in (-1, float("nan"), True, "3"):
            with pytest.raises((venturi.ConfigError, TypeError), match="timeout"):
                worker.stop(t.cast(t.Any, wrong))
        running = queue.enqueue(Work()).id
        handlers.await_begun(1)
        worker.stop()
        ended(queue, running)
