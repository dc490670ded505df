"""A worker may claim a job again whose earlier run still occupies one of its slots: the claim of that one was lost."""

from __future__ import annotations

import collections.abc as cabc
import threading
import typing as t

import psycopg
from fixtures.sqltext import on
from fixtures.waiting import eventually
from fixtures.work import ended, working

import venturi

Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[t.Any]]

GIVEN_BACK = "UPDATE {schema}.live SET owner = NULL, lease_until = NULL, visible_at = now()"


@venturi.task("overtaken")
class Work:
    """Runs until `finish` is set, the first time."""


def test_a_run_that_was_overtaken_gives_its_slot_back(queue: venturi.Queue, connect: Connect) -> None:
    """It is told, its result is refused, and the worker runs as many handlers as before."""
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
