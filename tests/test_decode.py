"""Jobs that this version of the code cannot read, and the limit of failures."""

from __future__ import annotations

import collections.abc as cabc
import datetime as dt
import typing as t
import uuid

import attrs
import psycopg
import pytest
from fixtures.claims import PAST, alter, strand
from fixtures.waiting import eventually
from fixtures.work import ended, until, working

import venturi
from venturi.store.connections import Session
from venturi.worker.settings import Settings

Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[tuple[t.Any, ...]]]

INSTANTLY = dt.timedelta(0)
LEAST = dt.timedelta(seconds=5)
DEEP = "[" * 5000 + "]" * 5000


@attrs.define
class Count:
    value: int = 0


@venturi.task("decode.step", carry=Count)
class Step:
    number: int = 0


def spoilt(queue: venturi.Queue, session: Session, what: str) -> uuid.UUID:
    """A job whose payload or carry no longer fits."""
    id_ = queue.enqueue(Step(1)).id
    if what == "payload":
        alter(session, queue.schema, id_, "payload", '{"number": "many"}', "jobs")
    else:
        alter(session, queue.schema, id_, "carry", '{"value": "many"}')
    return id_


def counting(queue: venturi.Queue) -> list[int]:
    """A handler that notes what it runs."""
    ran: list[int] = []

    @queue.handler
    def handle(task: Step) -> None:
        ran.append(task.number)

    return ran


@pytest.mark.conformance(145)
@pytest.mark.parametrize("what", ["payload", "carry"])
def test_a_job_that_cannot_be_decoded_is_a_failure_without_a_run(
    queue: venturi.Queue, session: Session, what: str
) -> None:
    """The handler is not called; retried with the decode text, duration 0, the carry untouched, 5 s later at least."""
    ran = counting(queue)
    id_ = spoilt(queue, session, what)
    carry = eventually(lambda: queue.job(id_)).carry  # type: ignore[union-attr]
    with working(queue):
        (entry,) = until(queue, id_, "retried")
    job = queue.job(id_)
    assert job is not None
    assert job.visible_at is not None
    assert (ran, job.status, job.failure_count, job.carry) == ([], "pending", 1, carry)
    assert entry.note is not None
    assert "expected int" in entry.note
    assert entry.duration == INSTANTLY
    assert job.visible_at - entry.recorded_at >= LEAST


@pytest.mark.conformance(145)
def test_a_decode_failure_waits_for_its_backoff_where_that_is_longer(queue: venturi.Queue, session: Session) -> None:
    """The five seconds are a least delay, not the only one."""
    counting(queue)
    id_ = spoilt(queue, session, "payload")
    alter(session, queue.schema, id_, "failure_count", 9)
    with working(queue, jitter=0.0):
        (entry,) = until(queue, id_, "retried")
    job = queue.job(id_)
    assert job is not None
    assert job.visible_at is not None
    assert job.visible_at - entry.recorded_at == dt.timedelta(seconds=55)


@pytest.mark.conformance(146)
def test_a_worker_that_can_decode_it_later_runs_it(queue: venturi.Queue, session: Session) -> None:
    """As if nothing had been: the failures stay counted (case 157)."""
    ran = counting(queue)
    id_ = spoilt(queue, session, "payload")
    with working(queue):
        until(queue, id_, "retried")
        alter(session, queue.schema, id_, "payload", '{"number": 4}', "jobs")
        alter(session, queue.schema, id_, "visible_at", PAST)
        until(queue, id_, "retried", "completed")
    assert ran == [4]


@pytest.mark.conformance(146)
@pytest.mark.parametrize(("failures", "outcome"), [(23, "retried"), (24, "dead")])
def test_a_job_that_stays_undecodable_ends_dead_at_the_backstop(
    queue: venturi.Queue, session: Session, failures: int, outcome: str
) -> None:
    """After 25 failures, and not before."""
    counting(queue)
    id_ = spoilt(queue, session, "payload")
    alter(session, queue.schema, id_, "failure_count", failures)
    with working(queue):
        (entry,) = until(queue, id_, outcome)
    assert entry.failure_count == failures + 1


@pytest.mark.conformance(147)
@pytest.mark.parametrize(
    "payload",
    [
        "[1, 2]",
        "[]",
        "7",
        "null",
        '"text"',
        "true",
        '{"number": 1.5}',
        DEEP,
        f'{{"number": {DEEP}}}',
        f'{{"number": 1{"0" * 5000}}}',
    ],
    ids=lambda payload: payload[:20],
)
def test_odd_json_as_payload_is_one_job_s_failure(queue: venturi.Queue, session: Session, payload: str) -> None:
    """Claims, recovery, queries and stats go on (cases 004, 011)."""
    ran = counting(queue)
    odd, lost = queue.enqueue(Step(1)).id, queue.enqueue(Step(2)).id
    for id_ in (odd, lost):
        alter(session, queue.schema, id_, "payload", payload, "jobs")
    strand(session, queue.schema, lost)
    good = queue.enqueue(Step(3)).id
    assert {job.id for job in queue.jobs()} == {odd, lost, good}
    with working(queue, lease=1):
        until(queue, odd, "retried")
        until(queue, lost, "recovered")
        ended(queue, good)
    assert ran == [3]
    counts = queue.stats().kinds["decode.step"]
    assert (counts.scheduled, counts.ready, counts.claimed) == (2, 0, 0)
    job = queue.job(odd)
    assert job is not None
    assert job.failure_count == 1


@pytest.mark.conformance(154)
def test_the_last_failure_that_is_allowed_ends_the_job(queue: venturi.Queue) -> None:
    """Limit 2: the first failure retries, the second is dead with failure_count 2."""

    @queue.handler
    def handle(task: Step) -> None:
        raise venturi.RetryLater(INSTANTLY)

    id_ = queue.enqueue(Step()).id
    with working(queue, backstop=2):
        entries = until(queue, id_, "retried", "dead")
    job = ended(queue, id_, "dead")
    assert ([entry.failure_count for entry in entries], job.failure_count) == ([1, 2], 2)


@pytest.mark.conformance(154)
def test_the_backstop_is_25_and_none_never_gives_up(queue: venturi.Queue, session: Session) -> None:
    """With None even the thousandth failure retries."""
    assert Settings.of({}).backstop == 25

    @queue.handler
    def handle(task: Step) -> None:
        raise ValueError

    id_, lost = queue.enqueue(Step()).id, queue.enqueue(Step()).id
    for each in (id_, lost):
        alter(session, queue.schema, each, "failure_count", 999)
    strand(session, queue.schema, lost)
    with working(queue, backstop=None):
        (entry,) = until(queue, id_, "retried")
        until(queue, lost, "recovered")
    assert entry.failure_count == 1000


@venturi.task("decode.keyed")
class Keyed:
    number: int

    def dedup_key(self) -> str:
        return "one"

    def merge(self, existing: venturi.Pending[Keyed]) -> venturi.Merge[Keyed]:
        return venturi.Combine(Keyed(self.number + existing.task.number))


@pytest.mark.conformance(155)
def test_pauses_releases_and_merges_never_count_toward_the_backstop(queue: venturi.Queue) -> None:
    """A backstop of 1 does not end a job that pauses, is released and is merged into (case 083)."""

    @queue.handler
    def handle(task: Keyed, ctx: venturi.Context) -> venturi.Outcome:
        if ctx.run_count < 3:
            return venturi.Pause()
        if ctx.run_count == 3:
            ctx.cancelled.wait(10)
            ctx.cancelled.check()
        return venturi.Completed(str(task.number))

    id_ = queue.enqueue(Keyed(1)).id
    queue.enqueue(Keyed(2))
    with working(queue, backstop=1):
        eventually(lambda: (job := queue.job(id_)) is not None and job.run_count == 3 and job.status == "claimed")
    until(queue, id_, "merged", "paused", "paused", "released")
    queue.enqueue(Keyed(4))
    with working(queue, backstop=1):
        (*_, entry) = until(queue, id_, "merged", "paused", "paused", "released", "merged", "completed")
    assert (entry.failure_count, entry.note) == (0, "7")


@pytest.mark.conformance(155)
def test_every_failure_counts_toward_the_backstop(queue: venturi.Queue, session: Session) -> None:
    """An exception, a RetryLater, a decode failure and a recovery, each once: the fifth failure is the last."""

    @queue.handler
    def handle(task: Step, ctx: venturi.Context[Count]) -> None:
        if ctx.failure_count == 0:
            raise ValueError
        raise venturi.RetryLater(INSTANTLY)

    def again() -> None:
        alter(session, queue.schema, id_, "visible_at", PAST)

    id_ = queue.enqueue(Step()).id
    with working(queue, backstop=99):
        until(queue, id_, "retried")
    alter(session, queue.schema, id_, "failure_count", 1)
    with working(queue, backstop=2):
        again()
        entries = until(queue, id_, "retried", "dead")
    assert [entry.failure_count for entry in entries] == [1, 2]
    for what, outcome in (("decode", "dead"), ("recovery", "dead")):
        other = spoilt(queue, session, "payload") if what == "decode" else queue.enqueue(Step()).id
        if what == "recovery":
            strand(session, queue.schema, other)
        with working(queue, backstop=1):
            (entry,) = until(queue, other, outcome)
        assert entry.failure_count == 1
