"""A worker may claim a job again whose earlier run still occupies one of its slots: the claim of that one was lost."""

from __future__ import annotations

import collections.abc as cabc
import datetime as dt
import threading
import typing as t

import psycopg
import pytest
from fixtures.sqltext import on
from fixtures.waiting import eventually
from fixtures.work import ended, until, working

import venturi

Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[t.Any]]

GIVEN_BACK = "UPDATE {schema}.live SET owner = NULL, lease_until = NULL, visible_at = now()"


@venturi.task("overtaken")
class Work:
    """Runs until `finish` is set, the first time."""


def test_a_run_that_was_overtaken_gives_its_slot_back(queue: venturi.Queue, connect: Connect) -> None:
    """It is told, its result is refused, and the worker runs as many handlers as before (case 064)."""
    began, finish, both = threading.Event(), threading.Event(), threading.Barrier(2, timeout=10)
    told: list[str | None] = []

    @queue.handler
    def work(task: Work, ctx: venturi.Context) -> None:
        if ctx.run_count == 1 and not finish.is_set():
            began.set()
            assert ctx.cancelled.wait(10)
            told.append(ctx.cancelled.reason)
            assert finish.wait(10)
        elif finish.is_set():
            both.wait()

    with connect(autocommit=True) as connection, working(queue, concurrency=2, lease=60, poll=0.05):
        job = queue.enqueue(Work()).id
        assert began.wait(5)
        connection.execute(on(queue.schema, GIVEN_BACK))
        ended(queue, job)
        eventually(lambda: told == ["lease lost"])
        finish.set()
        for pair in [[queue.enqueue(Work()).id for _ in range(2)] for _ in range(2)]:
            for each in pair:
                ended(queue, each)
    assert [entry.outcome for entry in queue.journal(job)] == ["completed"]


@venturi.task("overtaken.carrying", carry=dict)
class Carrying:
    """Its first run ends as it says, when `finish` is set, and its second one completes."""

    end: str


@pytest.mark.parametrize("end", ["complete", "pause", "fail", "die"])
def test_a_late_end_changes_nothing_of_the_run_after_it(
    queue: venturi.Queue, connect: Connect, caplog: pytest.LogCaptureFixture, end: str
) -> None:
    """Neither state, carry and counts nor the journal, though one worker runs both (case 064)."""
    began = [threading.Event() for _ in range(2)]
    finish = [threading.Event() for _ in range(2)]

    @queue.handler
    def carrying(task: Carrying, ctx: venturi.Context[dict[str, int]]) -> venturi.Outcome:
        number = ctx.run_count - 1
        began[number].set()
        assert finish[number].wait(10)
        ctx.carry["run"] = ctx.run_count
        if number == 1:
            return venturi.Pause(dt.timedelta(hours=1))
        if task.end == "fail":
            raise ValueError("late")
        if task.end == "die":
            raise venturi.PermanentError("late")
        return venturi.Pause() if task.end == "pause" else None

    with connect(autocommit=True) as connection, working(queue, concurrency=2, lease=60, poll=0.05):
        job = queue.enqueue(Carrying(end)).id
        assert began[0].wait(5)
        connection.execute(on(queue.schema, GIVEN_BACK))
        assert began[1].wait(5)
        before = queue.job(job)
        finish[0].set()
        eventually(lambda: "is not recorded" in caplog.text, what="the first run has ended")
        assert (queue.job(job), queue.journal(job)) == (before, [])
        finish[1].set()
        (entry,) = until(queue, job, "paused")
    after = queue.job(job)
    assert after is not None
    assert (entry.run_no, after.run_count, after.failure_count, after.carry) == (2, 2, 0, {"run": 2})


def test_a_stop_does_not_wait_for_a_run_that_was_overtaken(queue: venturi.Queue, connect: Connect) -> None:
    """Its job is settled, so that there is nothing to give back and nothing to wait for."""
    began, finish = threading.Event(), threading.Event()

    @queue.handler
    def work(task: Work, ctx: venturi.Context) -> None:
        if ctx.run_count == 1:
            began.set()
            finish.wait(20)

    worker = queue.work(block=False, concurrency=2, lease=60, poll=0.05)
    job = queue.enqueue(Work()).id
    assert began.wait(5)
    with connect(autocommit=True) as connection:
        connection.execute(on(queue.schema, GIVEN_BACK))
    ended(queue, job)
    worker.stop(0)
    report = worker.join(10)
    finish.set()
    assert report is not None
    assert (report.settled, report.unsettled) == (1, ())
