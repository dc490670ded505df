"""Claims of workers that are gone come back, as failures, exactly once."""

from __future__ import annotations

import collections.abc as cabc
import datetime as dt
import os
import subprocess
import sys
import threading
import time
import typing as t
import uuid

import attrs
import psycopg
import pytest
from fixtures.claims import PAST, alter, claim, claiming, completed, fill, strand
from fixtures.proxy import Proxy
from fixtures.waiting import eventually
from fixtures.work import ended, parked, until, working
from psycopg import sql

import venturi
from venturi import Priority
from venturi.store.claiming import Ending
from venturi.store.connections import Session

Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[tuple[t.Any, ...]]]

LEAST = dt.timedelta(seconds=5)


@attrs.define
class Page:
    number: int = 0


@venturi.task("recover.step", carry=Page)
class Step:
    number: int = 0

    def __attrs_post_init__(self) -> None:
        decoded.append(self.number)


decoded: list[int] = []
"""Numbers of the steps that were made, by decoding or otherwise."""


@venturi.task("recover.slow", backoff=venturi.Backoff(base=100, cap=10_000))
class Slow:
    pass


@venturi.task("recover.foreign")
class Foreign:
    pass


@pytest.fixture
def maintained(queue: venturi.Queue) -> venturi.Queue:
    """The queue with handlers that do nothing; its steps never come to run, since a recovery puts them off."""
    queue.handler(task=Step)(lambda task: None)
    queue.handler(task=Slow)(lambda task: None)
    return queue


def lost(queue: venturi.Queue, session: Session, task: object, **options: t.Any) -> uuid.UUID:
    """A job claimed by a worker that is gone."""
    id_ = queue.enqueue(task, **options).id
    strand(session, queue.schema, id_)
    return id_


@pytest.mark.conformance(163)
def test_an_expired_claim_becomes_pending_as_a_failure(maintained: venturi.Queue, session: Session) -> None:
    """No owner, its priority and last stored carry, one failure more, and one entry that names the last worker.

    Cases 071, 072.
    """
    queue, gone = maintained, claiming(maintained.schema)
    gone.heartbeat(session)
    id_ = queue.enqueue(Step(1), priority=Priority.LOW).id
    alter(session, queue.schema, id_, "carry", '{"number": 4}')
    strand(session, queue.schema, id_, owner=gone.owner)
    held = lost(queue, session, Step(2))
    alter(session, queue.schema, held, "lease_until", dt.datetime.now(dt.UTC) + dt.timedelta(hours=1))
    before = queue.job(held)
    with working(queue):
        (entry,) = until(queue, id_, "recovered")
    job = queue.job(id_)
    assert job is not None
    assert (job.status, job.failure_count, job.run_count) == ("pending", 1, 1)
    assert (job.owner, job.lease_until, job.priority, job.carry) == (None, None, Priority.LOW, {"number": 4})
    assert (entry.worker, entry.run_no, entry.failure_count) == (gone.owner, 1, 1)
    assert entry.note == "the lease of paper:1 ran out in run 1"
    assert (queue.job(held), queue.journal(held)) == (before, [])


@pytest.mark.conformance(164)
@pytest.mark.parametrize(
    ("task", "failures", "delay"),
    [(Step(), 0, 5), (Step(), 9, 55), (Slow(), 0, 100), (Foreign(), 9, 55)],
    ids=["least", "backoff", "own backoff", "foreign kind"],
)
def test_a_recovered_job_waits_for_its_backoff_and_five_seconds_at_least(
    maintained: venturi.Queue, session: Session, task: object, failures: int, delay: int
) -> None:
    """The kind's curve where this worker holds it, else the worker's; no user code runs (case 071)."""
    id_ = lost(maintained, session, task)
    alter(session, maintained.schema, id_, "failure_count", failures)
    decoded.clear()
    with working(maintained, jitter=0.0):
        (entry,) = until(maintained, id_, "recovered")
    job = maintained.job(id_)
    assert job is not None
    assert job.visible_at is not None
    assert job.visible_at - entry.recorded_at == dt.timedelta(seconds=delay)
    assert decoded == []


@pytest.mark.conformance(165)
def test_a_recovery_decided_on_an_older_epoch_does_nothing(queue: venturi.Queue, session: Session) -> None:
    """Also where the lease was renewed, or the job was settled, between look and recovery."""
    ids = [lost(queue, session, Step(number)) for number in range(3)]
    maintainer = claiming(queue.schema)
    seen = {uuid.UUID(claim.key): claim for claim in maintainer.expired(session, everywhere=True)}
    assert set(seen) == set(ids)
    alter(session, queue.schema, ids[0], "run_count", 2)
    alter(session, queue.schema, ids[1], "lease_until", dt.datetime.now(dt.UTC) + dt.timedelta(hours=1))
    assert maintainer.settle(session, [Ending(str(ids[2]), "recover.step", 1, seen[ids[2]].owner, "completed")]) == []
    before = [queue.job(id_) for id_ in ids]
    endings = [Ending(each.key, each.kind, each.run_count, each.owner, "recovered") for each in seen.values()]
    answers = maintainer.settle(session, endings, expired=True)
    assert {uuid.UUID(answer.key) for answer in answers} == set(ids)
    assert [queue.job(id_) for id_ in ids] == before
    assert [len(queue.journal(id_)) for id_ in ids] == [0, 0, 1]


@pytest.mark.conformance(165)
def test_workers_that_recover_at_once_leave_one_entry_for_each_lost_run(
    maintained: venturi.Queue, session: Session
) -> None:
    """Four of them start together over 120 expired claims (case 073)."""
    fill(session, maintained.schema, 120, "recover.step")
    ids = [job.id for job in maintained.jobs(limit=1000)]
    strand(session, maintained.schema, *ids)
    with working(maintained, lease=1), working(maintained, lease=1), working(maintained, lease=1), working(maintained):
        for id_ in ids:
            (entry,) = until(maintained, id_, "recovered")
            assert entry.failure_count == 1
    assert [job.failure_count for job in maintained.jobs(limit=1000)] == [1] * 120


@pytest.mark.conformance(166)
def test_expired_claims_are_recovered_in_batches_of_a_hundred_oldest_lease_first(
    maintained: venturi.Queue, session: Session
) -> None:
    """250 of them within 2 s (case 073)."""
    schema = sql.Identifier(maintained.schema)
    fill(session, maintained.schema, 250, "recover.step")
    session.execute(
        sql.SQL(
            "UPDATE {}.live SET owner = gen_random_uuid(), run_count = 1, "
            "lease_until = statement_timestamp() - (1 + random()) * interval '1 minute'"
        ).format(schema)
    )
    by_lease = sql.SQL("SELECT id FROM {}.live ORDER BY lease_until").format(schema)
    oldest_first = [row[0] for row in session.execute(by_lease)]
    entries = sql.SQL("SELECT job_id, recorded_at FROM {}.journal ORDER BY id").format(schema)
    with working(maintained):
        eventually(lambda: len(session.execute(entries).fetchall()) == 250, 2.0)
    recovered = session.execute(entries).fetchall()
    assert [id_ for id_, _ in recovered] == oldest_first
    times = [at for _, at in recovered]
    assert [times.count(at) for at in sorted(set(times))] == [100, 100, 50]


@pytest.mark.conformance(167)
def test_a_busy_worker_recovers_claims_of_kinds_that_it_does_not_handle(queue: venturi.Queue, session: Session) -> None:
    """While all of its slots are taken (case 069)."""
    started, go = threading.Event(), threading.Event()

    @queue.handler
    def handle(task: Step) -> None:
        started.set()
        assert go.wait(10)

    queue.enqueue(Step())
    with working(queue, concurrency=1, lease=1):
        assert started.wait(5)
        id_ = lost(queue, session, Foreign())
        until(queue, id_, "recovered", timeout=2.0)
        go.set()


@pytest.mark.conformance(167)
def test_a_lost_claim_takes_no_room_of_its_kind(queue: venturi.Queue, session: Session) -> None:
    """With cap 1 the jobs beside it run, and it is recovered meanwhile (case 069)."""
    ran: list[int] = []

    @queue.handler(cap=1)
    def handle(task: Step) -> None:
        ran.append(task.number)

    id_ = lost(queue, session, Step(0))
    others = [queue.enqueue(Step(number)).id for number in range(1, 4)]
    with working(queue, lease=1):
        for other in others:
            ended(queue, other)
        until(queue, id_, "recovered")
    assert ran == [1, 2, 3]


@pytest.mark.conformance(163)
@pytest.mark.parametrize("count", [1, 10])
def test_a_recovered_job_goes_before_what_is_less_urgent(queue: venturi.Queue, session: Session, count: int) -> None:
    """Its priority is the one that it was enqueued with, and it waits behind no other tier (case 072)."""
    id_ = lost(queue, session, Step(), priority=Priority.HIGH)
    recover(queue, session)
    queue.enqueue_many([Step(number) for number in range(20)], priority=Priority.LOW)
    alter(session, queue.schema, id_, "visible_at", dt.datetime.now(dt.UTC) - dt.timedelta(milliseconds=1))
    taken = claim(claiming(queue.schema), session, "recover.step", count=count)
    assert len(taken) == count
    assert taken[0].id == id_


@pytest.mark.conformance(169)
def test_a_recovered_job_wakes_parked_workers_for_the_time_it_is_due(
    maintained: venturi.Queue, session: Session, dsn: str, connect: Connect
) -> None:
    """A worker with poll 60 s that has parked runs it when it is due (case 091)."""
    ran = threading.Event()
    other = venturi.Queue(maintained.schema, dsn=dsn)
    other.handler(task=Step)(lambda task: ran.set())
    id_ = maintained.enqueue(Step()).id
    gone = claiming(maintained.schema)
    with working(other, poll=60, lease=60):
        ended(other, other.enqueue(Step()).id)
        ran.clear()
        # Claimed without a worker, and recovered with a short delay as a maintainer would.
        later = maintained.enqueue(Step(), delay=dt.timedelta(hours=1)).id
        strand(session, maintained.schema, later)
        parked(connect(autocommit=True))
        owner = other.job(later)
        assert owner is not None
        assert owner.owner is not None
        ending = Ending(str(later), "recover.step", 1, owner.owner, "recovered", delay=300_000)
        assert gone.settle(session, [ending], expired=True) == []
        assert ran.wait(0.8)
        ended(other, id_)
    other.close()


@pytest.mark.conformance(169)
def test_a_recovered_job_that_somebody_cancelled_is_cancelled(maintained: venturi.Queue, session: Session) -> None:
    """The request outlives the worker that would have been told."""
    id_ = lost(maintained, session, Step())
    assert maintained.cancel(id_)
    with working(maintained):
        (entry,) = until(maintained, id_, "cancelled")
    job = maintained.job(id_)
    assert job is not None
    assert (job.status, job.failure_count, entry.run_no) == ("cancelled", 0, 1)


_SUICIDE = """
import os, signal, sys
import venturi

queue = venturi.Queue(sys.argv[2], dsn=sys.argv[1], notify=False)

@venturi.task("recover.step")
class Step:
    number: int = 0

@queue.handler
def handle(task: Step) -> None:
    while not queue.stats().workers:
        pass  # its first heartbeat tells others who it was
    os.kill(os.getpid(), signal.SIGKILL)

queue.work(lease=1, concurrency=1)
"""


def killed(queue: venturi.Queue, dsn: str) -> int:
    """A worker process whose handler kills it; gives its pid once it is gone."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen([sys.executable, "-c", _SUICIDE, dsn, queue.schema], env=environment)
    try:
        assert process.wait(20) == -9
    finally:
        process.kill()
        process.wait()
    return process.pid


@pytest.mark.conformance(168)
def test_a_job_whose_process_was_killed_runs_again(schema: str, session: Session, dsn: str) -> None:
    """On the one worker left, without any notification, no later than its lease, a look for it, and the least delay."""
    queue = venturi.Queue(schema, dsn=dsn, notify=False)
    ran = threading.Event()
    queue.handler(task=Step)(lambda task: ran.set())
    id_ = queue.enqueue(Step()).id
    killed(queue, dsn)
    began = time.monotonic()
    with working(queue, lease=1):
        (entry,) = until(queue, id_, "recovered")
        assert time.monotonic() - began < 1 + 1 / 3 + 0.5
        job = queue.job(id_)
        assert job is not None
        assert job.visible_at is not None
        assert job.visible_at - entry.recorded_at == LEAST
        # The rest of the wait is cut short.
        alter(session, schema, id_, "visible_at", PAST)
        assert ran.wait(5)
        until(queue, id_, "recovered", "completed")
    queue.close()


@pytest.mark.conformance(156)
def test_a_job_that_kills_its_process_on_every_run_ends_dead(
    maintained: venturi.Queue, session: Session, dsn: str
) -> None:
    """At the 25th recovery, with a note naming the lost lease and the last worker (case 063)."""
    queue = maintained
    id_ = queue.enqueue(Step()).id
    for recovery in range(1, 25):
        strand(session, queue.schema, id_)
        recover(queue, session)
        alter(session, queue.schema, id_, "visible_at", PAST)
        assert len(queue.journal(id_)) == recovery
    pid = killed(queue, dsn)
    alter(session, queue.schema, id_, "lease_until", PAST)
    with working(queue):
        job = ended(queue, id_, "dead")
    entries = queue.journal(id_)
    assert [entry.outcome for entry in entries] == ["recovered"] * 24 + ["dead"]
    assert (job.failure_count, job.run_count) == (25, 25)
    assert entries[-1].note is not None
    assert entries[-1].note.endswith(f":{pid} ran out in run 25")
    assert "lease" in entries[-1].note


def recover(queue: venturi.Queue, session: Session) -> None:
    """Recover what has expired, as a maintainer does, but at once."""
    maintainer = claiming(queue.schema)
    expired = maintainer.expired(session, everywhere=True)
    endings = [Ending(each.key, each.kind, each.run_count, each.owner, "recovered") for each in expired]
    assert maintainer.settle(session, endings, expired=True) == []


@pytest.mark.conformance(168)
def test_after_an_outage_a_maintainer_renews_first_and_recovers_nothing_for_a_third_of_a_lease(
    queue: venturi.Queue, session: Session, proxy: Proxy
) -> None:
    """So that the first worker back does not take what the others still run."""
    distant = venturi.Queue(queue.schema, dsn=proxy.dsn)
    started, go = threading.Event(), threading.Event()

    @distant.handler
    def handle(task: Step) -> None:
        started.set()
        assert go.wait(10)

    own = queue.enqueue(Step()).id
    with working(distant, lease=2.4) as worker:
        assert started.wait(5)
        proxy.refuse()
        proxy.cut()
        other = lost(queue, session, Foreign())
        # Long enough for the wait before the next try to be longer than a third of the lease.
        time.sleep(1.6)
        proxy.resume()
        before = queue.job(own)
        assert before is not None
        renewed = eventually(
            lambda: (job := queue.job(own)) is not None and job.lease_until != before.lease_until and job.lease_until
        )
        (entry,) = until(queue, other, "recovered")
        go.set()
        ended(queue, own)
        assert worker.id != entry.worker
    distant.close()
    sent = t.cast(dt.datetime, renewed) - dt.timedelta(seconds=2.4)
    assert entry.recorded_at - sent >= dt.timedelta(seconds=0.75)
    assert [each.outcome for each in queue.journal(own)] == ["completed"]


def test_a_recovery_and_a_late_settle_exclude_each_other(queue: venturi.Queue, session: Session) -> None:
    """Whoever comes first wins, and the other one changes nothing."""
    queue.enqueue(Step())
    worker, maintainer = claiming(queue.schema), claiming(queue.schema)
    taken = claim(worker, session, "recover.step")
    alter(session, queue.schema, taken[0].id, "lease_until", PAST)
    recover(queue, session)
    (answer,) = worker.settle(session, completed(taken, worker.owner))
    assert (answer.ours, answer.done) == (False, False)
    assert maintainer.expired(session, everywhere=True) == []
    assert [entry.outcome for entry in queue.journal(taken[0].id)] == ["recovered"]
