"""What a claim takes, in which order, and that nobody else takes it too."""

from __future__ import annotations

import collections
import collections.abc as cabc
import contextlib
import datetime as dt
import threading
import time
import typing as t
import uuid

import psycopg
import pytest
from fixtures.claims import claim, claiming, registry
from fixtures.serverlog import ServerLog
from fixtures.waiting import eventually
from fixtures.work import ended, working
from psycopg import sql

import venturi
from venturi import Priority
from venturi.context import RunSignal
from venturi.registry import Handler
from venturi.store.connections import Session
from venturi.worker.flight import Run
from venturi.worker.runner import Runner
from venturi.worker.settings import Settings

Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[tuple[t.Any, ...]]]

HIGH, NORMAL, LOW = Priority.HIGH, Priority.NORMAL, Priority.LOW
INSTANTLY = dt.timedelta(0)


@venturi.task("claim.one")
class One:
    number: int = 0


@venturi.task("claim.two")
class Two:
    number: int = 0


@venturi.task("claim.foreign")
class Foreign:
    pass


def rows(connection: psycopg.Connection[t.Any], schema: str, columns: str) -> list[tuple[t.Any, ...]]:
    """Columns of the hot table, by id."""
    query: t.Any = f"SELECT {columns} FROM {{}}.live ORDER BY id"
    return connection.execute(sql.SQL(query).format(sql.Identifier(schema))).fetchall()


def recorder(queue: venturi.Queue, *tasks: type) -> list[int]:
    """Handlers that note the numbers of the tasks that they run."""
    ran: list[int] = []

    def handle(task: One | Two) -> None:
        ran.append(task.number)

    for each in tasks:
        queue.handler(task=each)(handle)
    return ran


@pytest.mark.conformance(88)
def test_a_claim_sets_owner_lease_and_run_count_and_nothing_else(
    queue: venturi.Queue, session: Session, connect: Connect
) -> None:
    """A claim gives status claimed, the owner, a lease from the database's now, and one run more."""
    id_ = queue.enqueue(One(1)).id
    others = "kind, priority, visible_at, failure_count, dedup_key, carry"
    before = rows(session, queue.schema, others)
    worker = claiming(queue.schema, lease=90)
    (taken,) = claim(worker, session, "claim.one")
    job = queue.job(id_)
    assert job is not None
    assert job.lease_until is not None
    assert (job.status, job.owner, job.run_count) == ("claimed", worker.owner, 1)
    now = dt.datetime.fromtimestamp(taken.eligible + taken.waited, dt.UTC)
    assert abs(job.lease_until - now - dt.timedelta(seconds=90)) < dt.timedelta(milliseconds=1)
    assert rows(session, queue.schema, others) == before


@pytest.mark.conformance(88)
def test_a_claim_that_finds_nothing_ready_changes_no_row(queue: venturi.Queue, session: Session) -> None:
    """With nothing ready no row gets a new version."""
    queue.enqueue(One(1), delay=dt.timedelta(hours=1))
    queue.enqueue(Two(2))
    before = rows(session, queue.schema, "id, xmin::text, xmax::text")
    assert claim(claiming(queue.schema), session, "claim.one") == []
    assert rows(session, queue.schema, "id, xmin::text, xmax::text") == before


@pytest.mark.conformance(89)
def test_jobs_that_are_not_due_or_of_other_kinds_stay_pending(queue: venturi.Queue) -> None:
    """A worker leaves alone what is due later, and kinds that it has no handler for."""
    later, foreign = queue.enqueue(One(1), delay=dt.timedelta(hours=1)).id, queue.enqueue(Foreign()).id
    ran = recorder(queue, One)
    ready = queue.enqueue(One(2)).id
    with working(queue):
        ended(queue, ready)
    assert ran == [2]
    for id_ in (later, foreign):
        job = queue.job(id_)
        assert job is not None
        assert (job.status, job.run_count, job.owner) == ("pending", 0, None)


@pytest.mark.conformance(90)
def test_jobs_run_by_priority_and_then_by_the_time_they_became_due(queue: venturi.Queue, session: Session) -> None:
    """Jobs of one call keep their order, a microsecond apart, and across kinds the oldest of a tier comes first."""
    ran = recorder(queue, One, Two)
    queue.enqueue_many([One(3), Two(4), One(5)])
    queue.enqueue(Two(6))
    queue.enqueue(One(7))
    queue.enqueue(One(8), priority=LOW)
    queue.enqueue_many([Two(1), One(2)], priority=HIGH)
    last = queue.enqueue(Two(9), priority=LOW).id
    at = [row[0] for row in rows(session, queue.schema, "visible_at")]
    assert [at[1] - at[0], at[2] - at[1]] == [dt.timedelta(microseconds=1)] * 2
    with working(queue, concurrency=1, priority_ratio=None):
        ended(queue, last)
    assert ran == list(range(1, 10))


@pytest.mark.conformance(91, 100)
def test_a_strict_worker_runs_the_most_urgent_first(queue: venturi.Queue) -> None:
    """LOW enqueued before NORMAL before HIGH runs HIGH, NORMAL, LOW with one slot and priority_ratio None.

    Case 100.
    """
    ran = recorder(queue, One)
    ids = [queue.enqueue(One(int(tier)), priority=tier).id for tier in (LOW, LOW, NORMAL, NORMAL, HIGH, HIGH)]
    with working(queue, concurrency=1, priority_ratio=None):
        ended(queue, ids[0])
        ended(queue, ids[1])
    assert ran == [HIGH, HIGH, NORMAL, NORMAL, LOW, LOW]


@pytest.mark.conformance(92)
@pytest.mark.parametrize("way", ["pause", "fail"])
def test_a_job_that_goes_back_goes_behind_its_peers(queue: venturi.Queue, way: str) -> None:
    """With one slot and A, B, C, D ready, A pausing or failing with no delay gives A, B, C, D, A."""
    ran: list[int] = []

    @queue.handler
    def handle(task: One, ctx: venturi.Context) -> venturi.Outcome:
        ran.append(task.number)
        if task.number > 0 or ctx.run_count > 1:
            return None
        if way == "fail":
            raise venturi.RetryLater(INSTANTLY)
        return venturi.Pause()

    first = queue.enqueue_many([One(0), One(1), One(2), One(3)])[0].id
    with working(queue, concurrency=1):
        ended(queue, first)
    assert ran == [0, 1, 2, 3, 0]


@pytest.mark.conformance(93)
def test_two_workers_run_no_job_twice(queue: venturi.Queue) -> None:
    """Two workers of four slots over 40 jobs: none runs twice, and all complete."""
    ran = recorder(queue, One)
    ids = [receipt.id for receipt in queue.enqueue_many([One(number) for number in range(40)])]
    with working(queue, concurrency=4), working(queue, concurrency=4):
        for id_ in ids:
            ended(queue, id_)
    assert sorted(ran) == list(range(40))
    assert [[entry.run_no for entry in queue.journal(id_)] for id_ in ids] == [[1]] * 40


@pytest.mark.conformance(94)
def test_jobs_that_fail_among_four_workers_run_once_for_each_failure_and_once_more(queue: venturi.Queue) -> None:
    """Four workers of six slots over 120 jobs failing 0 to 2 times: each runs exactly its failures plus one times."""
    ran: collections.Counter[int] = collections.Counter()
    lock = threading.Lock()

    @queue.handler
    def handle(task: One, ctx: venturi.Context) -> None:
        with lock:
            ran[task.number] += 1
        if ctx.failure_count < task.number % 3:
            raise venturi.RetryLater(INSTANTLY)

    ids = [receipt.id for receipt in queue.enqueue_many([One(number) for number in range(120)])]
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(working(queue, concurrency=6))
        for id_ in ids:
            ended(queue, id_)
    assert ran == {number: number % 3 + 1 for number in range(120)}
    assert [job.run_count for job in map(queue.job, ids) if job] == [number % 3 + 1 for number in range(120)]


@pytest.mark.conformance(95)
def test_eight_slots_are_filled_by_at_most_two_claims(schema: str, server_log: ServerLog) -> None:
    """Eight free slots and eight ready jobs take at most two claim statements."""
    queue = venturi.Queue(schema, dsn=server_log.dsn)
    running, go = threading.Semaphore(0), threading.Event()

    @queue.handler
    def handle(task: One) -> None:
        running.release()
        assert go.wait(5)

    queue.enqueue_many([One(number) for number in range(8)])
    server_log.clear()
    with working(queue, concurrency=8):
        for _ in range(8):
            assert running.acquire(timeout=5)
        claims = server_log.statements("SET owner = ")
        go.set()
    queue.close()
    assert 1 <= len(claims) <= 2


@pytest.mark.conformance(95)
def test_a_worker_never_holds_more_claims_than_slots(queue: venturi.Queue, connect: Connect) -> None:
    """However many jobs are ready, the claims of a worker are never more than its slots (case 103)."""
    most: list[int] = []
    watch = connect(autocommit=True)
    lock = threading.Lock()

    @queue.handler
    def handle(task: One) -> None:
        with lock:
            most.append(sum(row[0] is not None for row in rows(watch, queue.schema, "owner")))

    ids = [receipt.id for receipt in queue.enqueue_many([One(number) for number in range(150)])]
    with working(queue, concurrency=3):
        for id_ in ids:
            ended(queue, id_)
    assert len(most) == 150
    assert max(most) <= 3


@pytest.mark.conformance(96)
def test_undecodable_jobs_fail_alone(queue: venturi.Queue, session: Session) -> None:
    """Of 20 jobs claimed together two cannot be decoded: the other 18 run (case 011)."""
    ran = recorder(queue, One)
    ids = [receipt.id for receipt in queue.enqueue_many([One(number) for number in range(20)])]
    spoil = sql.SQL("UPDATE {}.jobs SET payload = %s WHERE id = %s").format(sql.Identifier(queue.schema))
    session.execute(spoil, ('{"number": "many"}', ids[4]))
    session.execute(spoil, ("[]", ids[11]))
    with working(queue, concurrency=20):
        eventually(lambda: all(queue.journal(id_) for id_ in ids))
    assert sorted(ran) == [number for number in range(20) if number not in (4, 11)]
    outcomes = [queue.journal(id_)[0].outcome for id_ in ids]
    assert [n for n, outcome in enumerate(outcomes) if outcome == "retried"] == [4, 11]
    assert outcomes.count("completed") == 18


@pytest.mark.conformance(97)
def test_a_claim_whose_lease_is_over_is_not_started(queue: venturi.Queue, session: Session) -> None:
    """A slot that takes a claim after the end of its lease gives it back instead of starting the handler."""
    ran: list[One] = []
    handlers = registry(Handler(ran.append, task=One))
    queue.enqueue(One(1))
    worker = claiming(queue.schema)
    (taken,) = claim(worker, session, "claim.one")
    runner = Runner(worker.owner, Settings.of({}), None, queue.telemetry, lambda _: [])
    ending = runner(Run(taken, handlers.find("claim.one"), RunSignal(lease_end=0.0)))
    assert ending is not None
    assert (ending.outcome, ran) == ("released", [])


@pytest.mark.conformance(174)
def test_a_locked_job_runs_soon_after_its_lock_is_gone_whatever_was_claimed_meanwhile(
    queue: venturi.Queue, session: Session, connect: Connect
) -> None:
    """No low-water mark hides an older job that was locked while a younger one was claimed."""
    ran = recorder(queue, One)
    first, second = (receipt.id for receipt in queue.enqueue_many([One(1), One(2)]))
    schema = sql.Identifier(queue.schema)
    session.execute(sql.SQL("UPDATE {}.live SET visible_at = visible_at - interval '1 h'").format(schema))
    holder = connect()
    holder.execute(sql.SQL("SELECT FROM {}.live WHERE id = %s FOR UPDATE").format(schema), (first,))
    with working(queue, poll=60):
        ended(queue, second)
        time.sleep(0.2)  # the worker has seen all of it with and without marks, and the next sweep is far
        holder.rollback()
        ended(queue, first, timeout=0.4)
    assert ran == [2, 1]


def test_ids_of_claims_are_those_of_the_jobs(queue: venturi.Queue, session: Session) -> None:
    """A claim brings the job's id, payload and counts."""
    id_ = queue.enqueue(One(7)).id
    (taken,) = claim(claiming(queue.schema), session, "claim.one")
    assert isinstance(taken.id, uuid.UUID)
    assert (taken.id, taken.payload, taken.run_count, taken.failure_count) == (id_, '{"number": 7}', 1, 0)
