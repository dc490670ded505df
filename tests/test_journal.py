"""The journal: one entry for each run and each event, and what it holds."""

from __future__ import annotations

import datetime as dt
import time
import typing as t
import uuid

import psycopg
import pytest
from fixtures.claims import claim, claiming
from fixtures.work import ended, until, working
from psycopg import sql

import venturi
from venturi.store.claiming import Ending
from venturi.store.connections import Session
from venturi.values import JournalOutcome

OUTCOMES: tuple[JournalOutcome, ...] = t.get_args(JournalOutcome)


@venturi.task("journal.step", aliases=("journal.stride",))
class Step:
    pass


INSERT = """
INSERT INTO {}.journal (job_id, run_no, failure_count, recorded_at, outcome, kind)
VALUES (%s, 1, 0, statement_timestamp(), %s, 'journal.step')
"""


@pytest.mark.conformance(131, 132)
def test_the_database_takes_the_nine_outcomes_and_no_other(queue: venturi.Queue, session: Session) -> None:
    """They read in this order; any other number is refused."""
    insert = sql.SQL(INSERT).format(sql.Identifier(queue.schema))
    id_ = uuid.uuid4()
    for number in range(9):
        session.execute(insert, (id_, number))
    for number in (-1, 9):
        with pytest.raises(psycopg.errors.CheckViolation):
            session.execute(insert, (id_, number))
    assert [entry.outcome for entry in queue.journal(id_)] == list(OUTCOMES)
    assert OUTCOMES == (
        "completed", "paused", "retried", "dead", "recovered", "released", "merged", "cancelled", "requeued",
    )  # fmt: skip


@pytest.mark.conformance(131)
@pytest.mark.parametrize("outcome", ["completed", "paused", "retried", "dead", "recovered", "released", "cancelled"])
def test_retried_dead_and_recovered_are_the_failures(
    queue: venturi.Queue, session: Session, outcome: JournalOutcome
) -> None:
    """Only they raise the failure_count, in the entry as on the job."""
    id_ = queue.enqueue(Step()).id
    worker = claiming(queue.schema)
    (taken,) = claim(worker, session, "journal.step")
    assert worker.settle(session, [Ending(taken.key, taken.kind, taken.run_count, worker.owner, outcome)]) == []
    failures = int(outcome in ("retried", "dead", "recovered"))
    (entry,) = queue.journal(id_)
    job = queue.job(id_)
    assert job is not None
    assert (entry.failure_count, job.failure_count) == (failures, failures)


@pytest.mark.conformance(132)
def test_entries_come_oldest_first_and_an_unknown_id_has_none(queue: venturi.Queue) -> None:
    """By entry id, which rises."""
    failing = iter([True, True, False])

    @queue.handler
    def handle(task: Step) -> None:
        if next(failing):
            raise venturi.RetryLater(dt.timedelta(0))

    id_ = queue.enqueue(Step()).id
    with working(queue):
        until(queue, id_, "retried", "retried", "completed")
    entries = queue.journal(id_)
    assert [entry.run_no for entry in entries] == [1, 2, 3]
    assert sorted(entry.id for entry in entries) == [entry.id for entry in entries]
    assert queue.journal(uuid.uuid4()) == []


@pytest.mark.conformance(133)
def test_an_entry_of_a_run_holds_all_that_is_known_of_it(queue: venturi.Queue) -> None:
    """Job, kind, run, outcome, time, note, evidence, worker and how long the handler ran."""

    @queue.handler
    def handle(task: Step, ctx: venturi.Context) -> venturi.Outcome:
        ctx.attach(pages=3)
        time.sleep(0.02)
        return venturi.Completed("all read")

    id_ = queue.enqueue(Step()).id
    with working(queue) as worker:
        (entry,) = until(queue, id_, "completed")
    assert (entry.job_id, entry.kind, entry.run_no, entry.outcome) == (id_, "journal.step", 1, "completed")
    assert (entry.note, entry.evidence, entry.worker) == ("all read", {"pages": 3}, worker.id)
    assert (entry.failure_count, entry.traceback) == (0, None)
    assert entry.duration is not None
    assert dt.timedelta(milliseconds=20) <= entry.duration < dt.timedelta(seconds=5)
    assert abs(dt.datetime.now(dt.UTC) - entry.recorded_at) < dt.timedelta(minutes=1)


@pytest.mark.conformance(133)
def test_the_kind_of_an_entry_is_that_of_its_job(queue: venturi.Queue, session: Session) -> None:
    """Also where the job is stored under an alias of the task that ran it."""
    queue.handler(task=Step)(lambda task: None)
    id_ = queue.enqueue(Step(), delay=dt.timedelta(hours=1)).id
    for statement in (
        "UPDATE {}.jobs SET kind = 'journal.stride'",
        "UPDATE {}.live SET kind = 'journal.stride', visible_at = statement_timestamp()",
    ):
        session.execute(sql.SQL(statement).format(sql.Identifier(queue.schema)))
    with working(queue):
        (entry,) = until(queue, id_, "completed")
    job = queue.job(id_)
    assert job is not None
    assert entry.kind == job.kind == "journal.stride"


@pytest.mark.conformance(134)
def test_each_run_has_its_own_evidence_and_note(queue: venturi.Queue) -> None:
    """Failed runs keep their evidence too; the note is the outcome's, or null."""

    @queue.handler
    def handle(task: Step, ctx: venturi.Context) -> venturi.Outcome:
        ctx.attach(run=ctx.run_count)
        match ctx.run_count:
            case 1:
                raise venturi.RetryLater(dt.timedelta(0), "too early")
            case 2:
                return venturi.Pause(note="half way")
            case 3:
                return venturi.Pause()
            case _:
                return None

    id_ = queue.enqueue(Step()).id
    with working(queue):
        entries = until(queue, id_, "retried", "paused", "paused", "completed")
    assert [entry.evidence for entry in entries] == [{"run": n} for n in (1, 2, 3, 4)]
    assert [entry.note for entry in entries[1:]] == ["half way", None, None]
    assert "too early" in str(entries[0].note)


@venturi.task("journal.keyed")
class Keyed:
    def dedup_key(self) -> str:
        return "one"


@pytest.mark.conformance(135)
def test_an_enqueue_writes_no_entry_and_run_numbers_begin_at_one(queue: venturi.Queue) -> None:
    """run_no is 0 only on what happened to a job that never ran."""
    queue.handler(task=Step)(lambda task: None)
    never = queue.enqueue(Keyed()).id
    assert queue.journal(never) == []
    queue.enqueue(Keyed())
    queue.cancel(never)
    assert [(entry.outcome, entry.run_no) for entry in queue.journal(never)] == [("merged", 0), ("cancelled", 0)]
    ran = queue.enqueue(Step()).id
    assert queue.journal(ran) == []
    with working(queue):
        ended(queue, ran)
    assert [entry.run_no for entry in queue.journal(ran)] == [1]
