"""Cancelling jobs: pending ones, claimed ones, and ones that are being claimed at this moment."""

from __future__ import annotations

import collections.abc as cabc
import datetime as dt
import threading
import time
import typing as t
import uuid

import psycopg
import pytest
from fixtures.waiting import eventually
from fixtures.work import ended, until, working

import venturi

Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[t.Any]]


@pytest.fixture
def schema(emptied: str) -> str:
    """All tests here are content with one schema, emptied in between."""
    return emptied


@venturi.task("work.long")
class Long:
    end: str = "complete"


@venturi.task("work.short")
class Short:
    pass


@pytest.fixture
def started() -> threading.Semaphore:
    """Counts the handlers that have begun."""
    return threading.Semaphore(0)


def obedient(queue: venturi.Queue, started: threading.Semaphore) -> list[str | None]:
    """Give the queue a handler that waits until it is told to stop, then ends as its task says; gives its reasons."""
    reasons: list[str | None] = []

    @queue.handler
    def handle(task: Long, ctx: venturi.Context) -> venturi.Outcome:
        started.release()
        ctx.cancelled.wait(10)
        reasons.append(ctx.cancelled.reason)
        match task.end:
            case "complete":
                return venturi.Completed("all the same")
            case "pause":
                return venturi.Pause()
            case "check":
                ctx.cancelled.check()
            case _:
                pass
        raise RuntimeError("no")

    return reasons


@pytest.mark.conformance(201)
def test_a_cancelled_pending_job_never_runs(queue: venturi.Queue) -> None:
    """Its status is cancelled, it has one entry that says so, and the time at which it ended."""
    ran = list[uuid.UUID]()

    @queue.handler
    def handle(task: Short, ctx: venturi.Context) -> None:
        ran.append(ctx.id)

    doomed, spared = queue.enqueue(Short()).id, queue.enqueue(Short()).id
    assert queue.cancel(doomed) is True
    with working(queue):
        ended(queue, spared)
    assert ran == [spared]
    job = queue.job(doomed)
    assert job is not None
    assert (job.status, job.run_count, job.owner) == ("cancelled", 0, None)
    assert [(entry.outcome, entry.run_no, entry.recorded_at) for entry in queue.journal(doomed)] == [
        ("cancelled", 0, job.finished_at)
    ]


@pytest.mark.conformance(202)
def test_the_run_of_a_cancelled_job_is_told_at_once_where_notifications_work(
    queue: venturi.Queue, dsn: str, started: threading.Semaphore
) -> None:
    """Its ``ctx.cancelled`` is set with the reason operator within a second, although the lease is a minute."""
    reasons = obedient(queue, started)
    operator = venturi.Queue(queue.schema, dsn=dsn)
    with working(queue):
        job = operator.enqueue(Long()).id
        assert started.acquire(timeout=5)
        began = time.monotonic()
        assert operator.cancel(job) is True
        ended(queue, job)
    operator.close()
    assert reasons == ["operator"]
    assert time.monotonic() - began < 1.5


@pytest.mark.conformance(202)
def test_the_run_of_a_cancelled_job_is_told_within_a_renewal_where_they_do_not(
    schema: str, dsn: str, started: threading.Semaphore
) -> None:
    """Without notifications the maintainer's interval, a third of the lease, is all that it takes."""
    queue = venturi.Queue(schema, dsn=dsn, notify=False)
    reasons = obedient(queue, started)
    with working(queue, lease=1.5):
        job = queue.enqueue(Long()).id
        assert started.acquire(timeout=5)
        began = time.monotonic()
        assert queue.cancel(job) is True
        eventually(lambda: reasons)
        assert time.monotonic() - began < 0.5 + 0.3
    queue.close()
    assert reasons == ["operator"]


@pytest.mark.conformance(203)
@pytest.mark.parametrize(
    ("end", "status"),
    [("complete", "completed"), ("pause", "cancelled"), ("check", "cancelled"), ("fail", "cancelled")],
)
def test_a_run_that_was_told_completes_or_is_cancelled(
    queue: venturi.Queue, started: threading.Semaphore, end: str, status: str
) -> None:
    """Work that is done stays done; a pause, a failure and giving way all end the job as cancelled."""
    obedient(queue, started)
    with working(queue):
        job = queue.enqueue(Long(end)).id
        assert started.acquire(timeout=5)
        assert queue.cancel(job)
        ended(queue, job, status)
    assert [entry.outcome for entry in queue.journal(job)] == [status]


@pytest.mark.conformance(204)
def test_a_finished_or_unknown_job_cannot_be_cancelled(queue: venturi.Queue) -> None:
    """Cancel returns False for completed, dead, cancelled and unknown jobs, and their records stay as they are."""

    @queue.handler
    def fail(task: Long) -> None:
        raise venturi.PermanentError("never")

    @queue.handler
    def complete(task: Short) -> None:
        pass

    finished = [
        queue.enqueue(Short()).id,
        queue.enqueue(Long()).id,
        queue.enqueue(Short(), priority=venturi.Priority.LOW).id,
    ]
    assert queue.cancel(finished[2])
    with working(queue):
        ended(queue, finished[0])
        ended(queue, finished[1], "dead")
    before = [(queue.job(id_), queue.journal(id_)) for id_ in finished]
    assert [job.status for job, _ in before if job is not None] == ["completed", "dead", "cancelled"]
    assert [queue.cancel(id_) for id_ in (*finished, uuid.uuid4())] == [False] * 4
    assert [(queue.job(id_), queue.journal(id_)) for id_ in finished] == before


@pytest.mark.conformance(205)
def test_a_cancel_that_races_the_claim_stops_the_job_or_tells_its_run(queue: venturi.Queue, dsn: str) -> None:
    """Of 200 jobs cancelled while they are claimed each one either never ran or was told; none is left over."""
    told: dict[uuid.UUID, str | None] = {}

    @queue.handler
    def handle(task: Short, ctx: venturi.Context) -> None:
        ctx.cancelled.wait(5)
        told[ctx.id] = ctx.cancelled.reason
        ctx.cancelled.check()

    operator = venturi.Queue(queue.schema, dsn=dsn)
    jobs = list[uuid.UUID]()
    with working(queue, concurrency=8, lease=1.5):
        for number in range(200):
            jobs.append(operator.enqueue(Short()).id)
            time.sleep((number % 20) * 0.00015)
            assert operator.cancel(jobs[-1])
        for job in jobs:
            ended(queue, job, "cancelled")
    operator.close()
    for job in jobs:
        (entry,) = queue.journal(job)
        assert entry.outcome == "cancelled"
        # A claimed job may be told before a slot has taken it; its handler is not started then.
        never_ran = entry.run_no == 0 or entry.note == "not started: operator"
        assert told.get(job) == (None if never_ran else "operator")
    assert 0 < len(told) < 200, "all on one side of the race: no race was tried"


@pytest.mark.conformance(205)
def test_a_request_that_comes_too_late_for_its_run_is_heeded_before_the_next(
    queue: venturi.Queue, connect: Connect, started: threading.Semaphore
) -> None:
    """A run that ended untold has put its job back to pending; the job is cancelled there."""
    go = threading.Event()

    @queue.handler
    def handle(task: Short) -> venturi.Outcome:
        started.release()
        go.wait(5)
        return venturi.Pause(dt.timedelta(hours=1))

    with working(queue, lease=1.5), connect() as late:
        job = queue.enqueue(Short()).id
        assert started.acquire(timeout=5)
        assert queue.cancel(job, conn=late)
        go.set()
        until(queue, job, "paused")
        late.commit()
        until(queue, job, "paused", "cancelled", timeout=2)
    cancelled = queue.job(job)
    assert cancelled is not None
    assert cancelled.status == "cancelled"


@pytest.mark.conformance(263)
def test_a_cancel_in_an_open_transaction_delays_nobody(
    queue: venturi.Queue, connect: Connect, started: threading.Semaphore
) -> None:
    """The claimed job is renewed and settled while the request is uncommitted, and so is every other job."""
    go = threading.Event()

    @queue.handler
    def long(task: Long) -> None:
        started.release()
        go.wait(10)

    @queue.handler
    def short(task: Short) -> None:
        pass

    with working(queue, lease=1), connect() as operator:
        job = queue.enqueue(Long()).id
        assert started.acquire(timeout=5)
        assert queue.cancel(job, conn=operator) is True
        claimed = queue.job(job)
        assert claimed is not None
        assert claimed.lease_until is not None
        eventually(lambda: _lease(queue, job) > claimed.lease_until, 2, what="the claim is renewed")
        ended(queue, queue.enqueue(Short()).id, timeout=1)
        go.set()
        ended(queue, job, "completed", timeout=1)
        operator.rollback()


def _lease(queue: venturi.Queue, id: uuid.UUID) -> t.Any:
    job = queue.job(id)
    assert job is not None
    return job.lease_until
