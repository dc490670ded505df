"""The counts of a queue, in one snapshot."""

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
from fixtures.work import ended, working

import venturi

Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[t.Any]]

HOUR = dt.timedelta(hours=1)


@pytest.fixture
def schema(emptied: str) -> str:
    """All tests here are content with one schema, emptied in between."""
    return emptied


@venturi.task("alpha")
class Alpha:
    number: int = 0


@venturi.task("beta")
class Beta:
    number: int = 0


@pytest.mark.conformance(213, 214)
def test_stats_count_ready_and_scheduled_jobs_by_kind(queue: venturi.Queue, connect: Connect) -> None:
    """The oldest ready age is that of ``visible_at``; kinds without such jobs are absent."""
    old, _ = (queue.enqueue(Alpha(n)).id for n in range(2))
    queue.enqueue(Beta())
    queue.enqueue(Alpha(2), delay=HOUR)
    assert queue.cancel(queue.enqueue(Beta()).id)
    with connect(autocommit=True) as connection:
        connection.execute(
            on(queue.schema, """UPDATE {schema}.live SET visible_at = visible_at - interval '90 s' WHERE id = %s"""),
            [old],
        )
    stats = queue.stats()
    assert set(stats.kinds) == {"alpha", "beta"}
    alpha, beta = stats.kinds["alpha"], stats.kinds["beta"]
    assert (alpha.ready, alpha.scheduled, alpha.claimed, alpha.dead) == (2, 1, 0, 0)
    assert (beta.ready, beta.scheduled, beta.claimed, beta.dead) == (1, 0, 0, 0)
    assert alpha.oldest_ready is not None
    assert dt.timedelta(seconds=90) <= alpha.oldest_ready < dt.timedelta(seconds=100)
    assert beta.oldest_ready is not None
    assert dt.timedelta(0) <= beta.oldest_ready < dt.timedelta(seconds=10)
    assert (stats.workers, stats.unserved) == (0, ("alpha", "beta"))


@pytest.mark.conformance(214)
def test_stats_count_claimed_and_dead_jobs_and_name_the_kinds_that_nobody_serves(queue: venturi.Queue) -> None:
    """A kind is served where a live worker handles it; one with scheduled or dead jobs alone is not named.

    Case 155.
    """
    started, go = threading.Event(), threading.Event()

    @queue.handler
    def handle(task: Alpha) -> None:
        if task.number:
            raise venturi.PermanentError("never")
        started.set()
        go.wait(10)

    assert queue.stats() == venturi.Stats({}, (), 0)
    with working(queue):
        dead, running = queue.enqueue(Alpha(1)).id, queue.enqueue(Alpha(0)).id
        ended(queue, dead, "dead")
        assert started.wait(5)
        queue.enqueue(Alpha(0), delay=HOUR)
        queue.enqueue(Beta(), delay=HOUR)
        eventually(lambda: queue.stats().workers == 1)
        stats = queue.stats()
        assert stats.kinds["alpha"] == venturi.KindStats(scheduled=1, claimed=1, dead=1, served=True)
        assert stats.kinds["beta"] == venturi.KindStats(scheduled=1, served=False)
        assert stats.unserved == ()
        queue.enqueue(Beta())
        assert queue.stats().unserved == ("beta",)
        go.set()
        ended(queue, running)
    assert queue.stats().workers == 0


@pytest.mark.conformance(215)
def test_stats_are_one_snapshot_while_workers_run(queue: venturi.Queue, connect: Connect) -> None:
    """While four workers turn 1000 jobs into dead ones, no call counts a job twice or misses one (case 167)."""

    @queue.handler
    def handle(task: Alpha) -> None:
        if task.number >= 0:
            raise venturi.PermanentError("never")

    queue.enqueue_many([Alpha(n) for n in range(1000)])
    seen = set[tuple[int, int, int]]()
    with working(queue), working(queue), working(queue), working(queue), connect(autocommit=True) as connection:
        dead = 0
        while dead < 1000:
            alpha = queue.stats(conn=connection).kinds["alpha"]
            dead = alpha.dead
            assert alpha.ready + alpha.scheduled + alpha.claimed + alpha.dead == 1000
            seen.add((alpha.ready, alpha.claimed, alpha.dead))
    assert len(seen) > 5, "the workers were too fast to be seen at work"


@pytest.mark.conformance(214)
def test_the_oldest_ready_age_is_never_negative_and_leaves_out_what_is_claimed(
    queue: venturi.Queue, connect: Connect
) -> None:
    """A claimed job is not ready however long ago it became due."""
    queue.enqueue(Alpha())
    with connect(autocommit=True) as connection:
        connection.execute(
            on(
                queue.schema,
                """UPDATE {schema}.live SET owner = %s, lease_until = now() + interval '1 h', run_count = 1,
                       visible_at = visible_at - interval '1 day'""",
            ),
            [uuid.uuid4()],
        )
    assert queue.stats().kinds["alpha"] == venturi.KindStats(claimed=1)
    queue.enqueue(Alpha(1), at=dt.datetime(2001, 1, 1, tzinfo=dt.UTC))
    age = queue.stats().kinds["alpha"].oldest_ready
    assert age is not None
    assert dt.timedelta(0) <= age < dt.timedelta(seconds=10)
