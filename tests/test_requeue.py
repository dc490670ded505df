"""Sending dead jobs back."""

from __future__ import annotations

import collections.abc as cabc
import datetime as dt
import threading
import typing as t
import uuid

import psycopg
import pytest
from fixtures.sqltext import on
from fixtures.waiting import eventually
from fixtures.work import ended, parked, working

import venturi

Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[t.Any]]

HOUR = dt.timedelta(hours=1)


@pytest.fixture
def schema(emptied: str) -> str:
    """All tests here are content with one schema, emptied in between."""
    return emptied


@venturi.task("fragile", carry=dict[str, int])
class Fragile:
    key: str

    def dedup_key(self) -> str:
        return self.key

    def merge(self, existing: object) -> venturi.Merge[Fragile]:
        return venturi.Keep()


@venturi.task("other")
class Other:
    number: int = 0


def bury(queue: venturi.Queue, *tasks: object) -> list[uuid.UUID]:
    """Enqueue jobs and let them die, one after the other."""
    grave = venturi.Queue[t.Any](queue.schema, dsn=queue.store.dsn)

    @grave.handler
    def fragile(task: Fragile, ctx: venturi.Context[dict[str, int]]) -> None:
        ctx.carry["runs"] = ctx.run_count
        if ctx.run_count == 1:
            raise venturi.RetryLater(dt.timedelta(0))
        raise venturi.PermanentError("for good")

    @grave.handler
    def other(task: Other) -> None:
        raise venturi.PermanentError("for good")

    jobs = list[uuid.UUID]()
    with working(grave, poll=0.02):
        for task in tasks:
            jobs.append(grave.enqueue(task).id)
            ended(grave, jobs[-1], "dead")
    grave.close()
    return jobs


@pytest.mark.conformance(206)
def test_a_requeued_job_is_what_it_was_without_its_failures(queue: venturi.Queue, dsn: str, connect: Connect) -> None:
    """Same id, payload, priority, key and carry; no failures; its runs counted; due now, and parked workers wake."""
    (job,) = bury(queue, Fragile("k"))
    before = queue.job(job)
    assert before is not None
    assert (before.status, before.run_count, before.failure_count, before.carry) == ("dead", 2, 2, {"runs": 1})
    seen = list[tuple[uuid.UUID, int, int, dict[str, int]]]()

    @queue.handler
    def handle(task: Fragile, ctx: venturi.Context[dict[str, int]]) -> None:
        seen.append((ctx.id, ctx.run_count, ctx.failure_count, dict(ctx.carry)))

    operator = venturi.Queue(queue.schema, dsn=dsn)
    with working(queue, poll=60), connect(autocommit=True) as connection:
        parked(connection)
        assert operator.requeue(job, delay=HOUR) is True
        scheduled = operator.job(job)
        assert scheduled is not None
        assert scheduled.visible_at is not None
        assert abs(scheduled.visible_at - dt.datetime.now(dt.UTC) - HOUR) < dt.timedelta(seconds=30)
        same = ("id", "payload", "priority", "dedup_key", "carry", "created_at", "run_count")
        assert [getattr(scheduled, name) for name in same] == [getattr(before, name) for name in same]
        assert (scheduled.status, scheduled.failure_count, scheduled.finished_at) == ("pending", 0, None)
        entry = operator.journal(job)[-1]
        assert (entry.outcome, entry.run_no, entry.failure_count) == ("requeued", 2, 0)
        assert seen == []
        # Dead again by hand, so that it can be sent back without a delay.
        connection.execute(on(queue.schema, "DELETE FROM {schema}.live"))
        connection.execute(
            on(queue.schema, """INSERT INTO {schema}.dead SELECT %s, 'fragile', now(), 2, 2, '{{"runs": 1}}'"""), [job]
        )
        parked(connection)
        assert operator.requeue(job) is True
        ended(queue, job, timeout=1)
    operator.close()
    assert seen == [(job, 3, 0, {"runs": 1})]


@pytest.mark.conformance(207)
def test_only_dead_jobs_are_sent_back_and_they_merge_with_nothing(queue: venturi.Queue) -> None:
    """Requeue is False for pending, cancelled and unknown jobs; a pending job of the same key stays beside the old."""
    (dead,) = bury(queue, Fragile("k"))
    twin = queue.enqueue(Fragile("k")).id
    gone = queue.enqueue(Other()).id
    assert queue.cancel(gone)
    assert [queue.requeue(id_) for id_ in (twin, gone, uuid.uuid4())] == [False, False, False]
    assert queue.requeue(dead) is True
    assert queue.requeue(dead) is False
    assert {job.id for job in queue.jobs(status="pending", kind="fragile")} == {dead, twin}


@pytest.mark.conformance(207)
def test_a_settle_from_a_run_before_the_requeue_is_refused(queue: venturi.Queue, connect: Connect) -> None:
    """A run that was recovered, died and was sent back cannot end the job any more."""
    started, go = threading.Event(), threading.Event()

    @queue.handler
    def handle(task: Other) -> None:
        started.set()
        go.wait(10)

    with working(queue, concurrency=1) as worker:
        job = queue.enqueue(Other()).id
        assert started.wait(5)
        with connect(autocommit=True) as connection:
            connection.execute(on(queue.schema, "DELETE FROM {schema}.live"))
            connection.execute(
                on(queue.schema, """INSERT INTO {schema}.dead SELECT %s, 'other', now(), 1, 1, NULL"""), [job]
            )
        assert queue.requeue(job, delay=HOUR)
        go.set()
        ended(queue, queue.enqueue(Other()).id)
        worker.stop()
        report = worker.join(5)
    assert report is not None
    assert report.settled == 1
    assert [entry.outcome for entry in queue.journal(job)] == ["requeued"]
    pending = queue.job(job)
    assert pending is not None
    assert pending.status == "pending"


@pytest.mark.conformance(208)
def test_the_longest_dead_are_sent_back_first(queue: venturi.Queue) -> None:
    """requeue_many takes the oldest deaths of the kind up to its limit and returns how many."""
    jobs = bury(queue, Other(0), Fragile("a"), Other(1), Other(2))
    assert queue.requeue_many(kind="other", limit=2) == 2
    assert [_status(queue, job) for job in jobs] == ["pending", "dead", "pending", "dead"]
    assert queue.requeue_many() == 2
    assert queue.requeue_many() == 0
    eventually(lambda: all(_status(queue, job) == "pending" for job in jobs))
    with pytest.raises(venturi.ConfigError, match="limit"):
        queue.requeue_many(limit=0)


def _status(queue: venturi.Queue, id: uuid.UUID) -> str:
    job = queue.job(id)
    assert job is not None
    return job.status
