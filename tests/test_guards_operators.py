"""Every condition that guards a producer's or an operator's statement, each by a test that fails without it."""

from __future__ import annotations

import collections.abc as cabc
import datetime as dt
import typing as t
import uuid

import pytest
from fixtures.claims import claim, claiming
from fixtures.rows import Rows, locked, rows

import venturi
from venturi.store.claiming import Claiming
from venturi.store.connections import Session, run
from venturi.store.looking import Looking
from venturi.store.looking_sql import CANCEL_CLAIMED
from venturi.store.sql import Sql

__all__ = ["rows"]

OTHER = uuid.uuid4()
NOW = dt.timedelta(0)


@venturi.task("a")
class Task:
    number: int = 0
    key: str | None = None
    keeps: bool = False

    def dedup_key(self) -> str | None:
        return self.key

    def merge(self, existing: venturi.Pending[Task]) -> venturi.Merge[Task]:
        return venturi.Keep() if self.keeps else venturi.Replace()


@venturi.task("b")
class Unlike(Task):
    pass


@pytest.fixture
def queue(rows: Rows, dsn: str) -> cabc.Iterator[venturi.Queue]:
    """A queue on the shared schema."""
    queue = venturi.Queue(rows.schema, dsn=dsn)
    yield queue
    queue.close()


@pytest.fixture
def looking(rows: Rows, session: Session) -> Looking:
    """The operators' statements, on a session that waits for no lock."""
    session.execute("SET lock_timeout = '200ms'")
    return Looking(Sql(rows.schema))


@pytest.fixture
def worker(rows: Rows, looking: Looking) -> Claiming:
    """A worker whose session waits for no lock."""
    return claiming(rows.schema)


def cleaned(looking: Looking, session: Session, kind: str | None = None, status: str | None = None) -> int:
    """Clean up what finished more than 30 seconds ago."""
    before = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=30)
    statuses = ["completed", "dead", "cancelled"] if status is None else [status]
    return looking.cleanup(session, finished_before=before, kinds=kind and [kind], statuses=statuses)


def requeued(
    looking: Looking, session: Session, *, id: uuid.UUID | None = None, kind: str | None = None, limit: int = 9
) -> int:
    """Send dead jobs back."""
    return looking.requeue(session, id=id, kinds=kind and [kind], limit=limit, delay=NOW)


def request(rows: Rows, *ids: uuid.UUID) -> None:
    """Ask to cancel the first run of jobs."""
    for id_ in ids:
        rows.run("INSERT INTO {schema}.cancels VALUES (%s, 1, statement_timestamp())", id_)


# --- Merge


@pytest.mark.conformance(79, 80)
@pytest.mark.parametrize("other", ["kind", "key", "claimed"])
def test_a_merge_finds_pending_jobs_of_its_kind_and_key_only(queue: venturi.Queue, rows: Rows, other: str) -> None:
    """A job of another kind or key, or a claimed one, is no candidate."""
    rows.put(
        "b" if other == "kind" else "a",
        key="other" if other == "key" else "mine",
        **({"owner": OTHER, "run": 1} if other == "claimed" else {}),  # type: ignore[arg-type]
    )
    assert queue.enqueue(Task(key="mine")).action == "inserted"


@pytest.mark.conformance(67, 79)
def test_a_merge_changes_the_oldest_pending_job_alone(queue: venturi.Queue, rows: Rows) -> None:
    """Other jobs, older siblings' payloads among them, stay as they are."""
    first = rows.put(key="mine")
    second, other = rows.put(key="mine"), rows.put(key="other")
    rows.run("UPDATE {schema}.jobs SET created_at = created_at - interval '1 h' WHERE id = %s", first)
    assert queue.enqueue(Task(7, key="mine"), priority=venturi.Priority.HIGH) == venturi.Receipt(first, "replaced")
    query = "SELECT l.id, l.priority, j.payload->>'number' FROM {schema}.live l JOIN {schema}.jobs j ON j.id = l.id"
    assert set(rows.run(query)) == {(first, 0, "7"), (second, 1, None), (other, 1, None)}


@pytest.mark.conformance(82)
def test_a_merge_passes_over_a_job_that_it_cannot_decode(queue: venturi.Queue, rows: Rows) -> None:
    """The next candidate is taken instead."""
    odd = rows.put(key="mine")
    rows.run("UPDATE {schema}.jobs SET payload = '[]', created_at = created_at - interval '1 h' WHERE id = %s", odd)
    good = rows.put(key="mine")
    assert queue.enqueue(Task(key="mine")) == venturi.Receipt(good, "replaced")


def test_a_claim_passes_over_a_merge_in_progress(
    queue: venturi.Queue, rows: Rows, worker: Claiming, session: Session, connect: t.Any
) -> None:
    """From the decision to the commit the job cannot be claimed, though Keep changes nothing of it."""
    rows.put(key="mine")
    with connect() as other:
        assert queue.enqueue(Task(key="mine", keeps=True), conn=other).action == "kept"
        assert claim(worker, session, "a") == []
    assert len(claim(worker, session, "a")) == 1


# --- Cancel


@pytest.mark.conformance(201, 204)
def test_cancel_ends_the_pending_job_that_it_names(rows: Rows, looking: Looking, session: Session) -> None:
    """Another pending job stays, and an unknown id cancels nothing."""
    job, other = rows.put(), rows.put()
    assert not looking.cancel(session, uuid.uuid4(), notify=False)
    assert looking.cancel(session, job, notify=False)
    assert set(rows.live()) == {other}
    assert rows.entries() == [(job, 7, 0)]


@pytest.mark.conformance(204)
def test_cancel_asks_for_the_end_of_the_claim_that_it_names(rows: Rows, looking: Looking, session: Session) -> None:
    """A claimed job stays claimed, and the request speaks of it alone."""
    job, other = rows.put(owner=OTHER, run=3), rows.put(owner=OTHER, run=4)
    assert not looking.cancel(session, uuid.uuid4(), notify=False)
    assert looking.cancel(session, job, notify=False)
    assert rows.live() == {job: (OTHER, 3, 0), other: (OTHER, 4, 0)}
    assert rows.run("SELECT job_id, run_count FROM {schema}.cancels") == [(job, 3)]
    assert rows.entries() == []


def test_only_claims_are_asked_to_end(rows: Rows, session: Session) -> None:
    """A job that is pending again when the request would be written gets none."""
    job = rows.put(run=1)
    assert run(session, Sql(rows.schema)(CANCEL_CLAIMED), (job,)).fetchall() == []


def test_a_cancel_that_a_claim_overtakes_asks_for_its_end(
    rows: Rows, looking: Looking, worker: Claiming, session: Session, connect: t.Any
) -> None:
    """A claim that commits while the cancel waits for the row is not deleted."""
    job = rows.put()
    session.execute("SET lock_timeout = '5s'")
    holder = connect()
    locked(holder, rows, job)

    def change() -> None:
        holder.execute(f"UPDATE {rows.schema}.live SET owner = %s, lease_until = 'tomorrow', run_count = 1", [OTHER])
        holder.commit()

    assert rows.blocked(lambda: looking.cancel(session, job, notify=False), change)
    assert rows.live() == {job: (OTHER, 1, 0)}
    assert rows.run("SELECT job_id, run_count FROM {schema}.cancels") == [(job, 1)]


def test_a_worker_is_told_of_its_own_jobs_and_claims_stay(rows: Rows, worker: Claiming, session: Session) -> None:
    """Requests for other jobs are left to other workers, and for claimed ones nothing is done yet."""
    mine, other = rows.put(owner=OTHER, run=1), rows.put(owner=OTHER, run=1)
    request(rows, mine, other)
    assert worker.cancels(session, [str(mine)]) == [(str(mine), 1)]
    assert worker.cancels(session, [str(other)]) == [(str(other), 1)]
    assert set(rows.live()) == {mine, other}


def test_what_went_back_after_a_request_is_cancelled(rows: Rows, worker: Claiming, session: Session) -> None:
    """It alone: a pending job that nobody asked about stays; the request is done with, as are those of ended jobs."""
    asked, other, gone = rows.put(run=1), rows.put(run=1), rows.end(0)
    request(rows, asked, gone)
    assert worker.cancels(session, [str(asked), str(gone)]) == []
    assert set(rows.live()) == {other}
    assert [(job, outcome) for job, outcome, _ in rows.entries()] == [(gone, 0), (asked, 7)]
    assert rows.run("SELECT job_id FROM {schema}.cancels") == []


def test_requests_do_not_wait_for_a_row(rows: Rows, worker: Claiming, session: Session, connect: t.Any) -> None:
    """A pending job that somebody locks keeps its request, and is cancelled next time."""
    job = rows.put(run=1)
    request(rows, job)
    holder = connect()
    locked(holder, rows, job)
    assert worker.cancels(session, [str(job)]) == [(str(job), 1)]
    holder.rollback()
    worker.cancels(session, [])
    assert rows.entries() == [(job, 7, 1)]


# --- Requeue


@pytest.mark.conformance(207)
def test_requeue_sends_back_the_job_that_it_names(rows: Rows, looking: Looking, session: Session) -> None:
    """Other dead jobs stay dead; the job's own body comes back with it, and a request to cancel it is forgotten."""
    other, job = rows.end(3, "b", at=-90), rows.end(3, "a")
    request(rows, other, job)
    assert requeued(looking, session, id=uuid.uuid4()) == 0
    assert requeued(looking, session, id=job) == 1
    assert rows.ids("dead") == {other}
    assert rows.run("SELECT id, kind FROM {schema}.live") == [(job, "a")]
    assert rows.run("SELECT job_id FROM {schema}.cancels") == [(other,)]


@pytest.mark.conformance(208)
def test_requeue_many_takes_the_longest_dead_of_a_kind_up_to_a_limit(
    rows: Rows, looking: Looking, session: Session
) -> None:
    """Another kind's, and the younger ones, stay dead."""
    rows.end(3, "b", at=-99)
    jobs = [rows.end(3, at=-at) for at in (50, 80, 70)]
    assert requeued(looking, session, kind="a", limit=2) == 2
    assert rows.ids("live") == {jobs[1], jobs[2]}


def test_requeue_does_not_wait_for_a_row(rows: Rows, looking: Looking, session: Session, connect: t.Any) -> None:
    """A dead job that somebody locks is passed over."""
    held, free = rows.end(3, at=-90), rows.end(3)
    locked(connect(), rows, held, "dead")
    assert requeued(looking, session) == 1
    assert rows.ids("live") == {free}


# --- Cleanup


@pytest.mark.conformance(216)
def test_cleanup_deletes_old_jobs_with_all_that_is_theirs(rows: Rows, looking: Looking, session: Session) -> None:
    """Younger jobs keep body, entries and place among the dead."""
    for outcome in (0, 3, 7):
        rows.end(outcome)
    young = {rows.end(outcome, at=-1) for outcome in (0, 3, 7)}
    assert cleaned(looking, session) == 3
    assert rows.ids("jobs") == {job for job, _, _ in rows.entries()} == young
    assert len(rows.ids("dead")) == 1


@pytest.mark.conformance(217)
def test_cleanup_takes_only_the_kind_and_status_asked_for(rows: Rows, looking: Looking, session: Session) -> None:
    """Completed jobs of one kind go, its dead ones and other kinds' stay."""
    rows.end(0, "a")
    kept = {rows.end(0, "b"), rows.end(3, "a")}
    assert cleaned(looking, session, "a", "completed") == 1
    assert rows.ids("jobs") == kept


@pytest.mark.conformance(217)
def test_cleanup_leaves_what_was_sent_back(rows: Rows, looking: Looking, session: Session) -> None:
    """A live job is unfinished whatever its journal says, and one that has died again counts from its last end."""
    back, again = rows.end(3, at=-90), rows.end(3, at=-90)
    assert requeued(looking, session) == 2
    rows.run("DELETE FROM {schema}.journal WHERE job_id = %s AND outcome = 8", back)
    rows.run("UPDATE {schema}.journal SET outcome = 0 WHERE job_id = %s", back)
    rows.run(
        "WITH gone AS (DELETE FROM {schema}.live WHERE id = %s RETURNING id, kind), "
        "buried AS (INSERT INTO {schema}.dead (id, kind, died_at, run_count, failure_count) "
        "SELECT id, kind, now(), 2, 1 FROM gone) "
        "INSERT INTO {schema}.journal (job_id, run_no, failure_count, recorded_at, outcome, kind) "
        "SELECT id, 2, 1, now(), 3, kind FROM gone",
        again,
    )
    assert cleaned(looking, session) == 0
    assert rows.ids("jobs") == {back, again}


@pytest.mark.conformance(217)
def test_cleanup_leaves_a_dead_job_whose_grave_somebody_holds(
    rows: Rows, looking: Looking, session: Session, connect: t.Any
) -> None:
    """A requeue may be under way."""
    held, _ = rows.end(3), rows.end(3)
    locked(connect(), rows, held, "dead")
    assert cleaned(looking, session) == 1
    assert rows.ids("jobs") == {held}


@pytest.mark.conformance(218)
def test_cleanup_takes_a_thousand_at_most_and_waits_for_nobody(
    rows: Rows, looking: Looking, session: Session, connect: t.Any
) -> None:
    """A body that another cleanup holds is passed over."""
    held = rows.end(0, at=-999)
    rows.run(
        "WITH bodies AS (INSERT INTO {schema}.jobs (id, kind, payload, priority, created_at) "
        "SELECT gen_random_uuid(), 'a', '{{}}', 1, now() FROM generate_series(1, 1001) RETURNING id) "
        "INSERT INTO {schema}.journal (job_id, run_no, failure_count, recorded_at, outcome, kind) "
        "SELECT id, 1, 0, now() - interval '1 h', 0, 'a' FROM bodies"
    )
    holder = connect()
    locked(holder, rows, held, "jobs")
    assert [cleaned(looking, session) for _ in range(3)] == [1000, 1, 0]
    assert rows.ids("jobs") == {held}
