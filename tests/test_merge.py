"""What a second enqueue of a dedup key does to the job that is pending already."""

from __future__ import annotations

import collections.abc as cabc
import datetime as dt
import typing as t

import psycopg
import pytest
from fixtures.deciding import Counter, Decide, Seen, adds, decides, given, keeps, replaces
from fixtures.statements import Bell
from fixtures.work import until, working
from psycopg import sql

import venturi
from venturi import Combine, Independent, Keep, Pause, Priority, Replace

Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[t.Any]]

pytestmark = pytest.mark.usefixtures("undecided")

HOUR = dt.timedelta(hours=1)


@venturi.task("default")
class Default:
    """A task with a key and no merge()."""

    value: int

    def dedup_key(self) -> str:
        return "only"


@pytest.fixture
def schema(emptied: str) -> str:
    """One schema for all tests here, emptied after each."""
    return emptied


@pytest.mark.conformance(66)
def test_without_a_key_nothing_is_merged(queue: venturi.Queue) -> None:
    """Two enqueues without a key are two jobs, and merge() is not asked."""
    receipts = [queue.enqueue(Counter(None)), queue.enqueue(Counter(None)), *queue.enqueue_many([Counter(None)] * 2)]
    assert len({receipt.id for receipt in receipts}) == 4
    assert {receipt.action for receipt in receipts} == {"inserted"}
    assert given == []


@pytest.mark.conformance(2, 67)
def test_replace_is_what_happens_without_a_decision(queue: venturi.Queue) -> None:
    """The second payload takes the place of the first, in the same job."""
    first, second = queue.enqueue(Default(1)), queue.enqueue(Default(2))
    assert second == venturi.Receipt(first.id, "replaced")
    assert [(job.id, job.payload) for job in queue.jobs()] == [(first.id, {"value": 2})]


@pytest.mark.conformance(68, 73)
@pytest.mark.parametrize("asked", [Priority.HIGH, Priority.LOW])
@pytest.mark.parametrize("decision", ["Replace", "Combine"])
def test_a_merge_takes_the_priority_that_the_enqueue_asked_for(
    queue: venturi.Queue, connect: Connect, asked: Priority, decision: str
) -> None:
    """Up or down, in the live row and in the body."""
    if decision == "Combine":
        decides(adds)
    queue.enqueue(Counter("a"))
    job = _job(queue, queue.enqueue(Counter("a"), priority=asked))
    assert job.priority is asked
    body = sql.SQL("SELECT priority FROM {}").format(sql.Identifier(queue.schema, "jobs"))
    assert connect().execute(body).fetchall() == [(int(asked),)]


@pytest.mark.conformance(73)
def test_combine_may_set_the_priority_and_keeps_the_key(queue: venturi.Queue) -> None:
    """The decision's priority wins over the enqueue's, and the key is not computed again from the combined task."""
    decides(lambda task, existing: Combine(Counter("other"), priority=Priority.LOW))
    queue.enqueue(Counter("a"))
    job = _job(queue, queue.enqueue(Counter("a"), priority=Priority.HIGH))
    assert (job.priority, job.dedup_key, job.payload["key"]) == (Priority.LOW, "a", "other")


@pytest.mark.conformance(69, 72, 75, 76)
@pytest.mark.parametrize("decision", ["Replace", "Combine", "Keep"])
def test_what_of_a_job_that_ran_survives_a_merge(queue: venturi.Queue, connect: Connect, decision: str) -> None:
    """Id, creation, key and runs stay; Replace forgets carry and failures, Combine and Keep do not."""
    by: dict[str, Decide] = {"Replace": replaces, "Combine": adds, "Keep": keeps}
    decides(by[decision])
    _pausing(queue)
    before = queue.job(queue.enqueue(Counter("a", 10)).id)
    assert before is not None
    with working(queue):
        until(queue, before.id, "paused")
    _set(connect, queue, "failure_count = 3")
    after = _job(queue, queue.enqueue(Counter("a", 5)))
    assert (after.id, after.created_at, after.run_count, after.dedup_key) == (before.id, before.created_at, 1, "a")
    expected = {"Replace": (5, None, 0), "Combine": (15, {"times": 8}, 3), "Keep": (10, {"times": 7}, 3)}[decision]
    assert (after.payload["number"], after.carry, after.failure_count) == expected
    entries = queue.journal(before.id)
    assert [(entry.outcome, entry.run_no) for entry in entries] == [("paused", 1), ("merged", 1)]
    assert entries[1].note == decision


@pytest.mark.conformance(72)
def test_combine_without_a_carry_keeps_the_existing_one(queue: venturi.Queue) -> None:
    """10 combined with 5 makes 15; a carry that is not given stays, a given one is stored, None is a value."""
    decides(adds)
    queue.enqueue(Counter("a", 10))
    job = _job(queue, receipt := queue.enqueue(Counter("a", 5)))
    assert receipt.action == "combined"
    assert (job.payload["number"], job.carry) == (15, {"times": 1})
    decides(lambda task, existing: Combine(task))
    assert _job(queue, queue.enqueue(Counter("a", 6))).carry == {"times": 1}
    decides(lambda task, existing: Combine(task, carry=None))
    queue.enqueue(Counter("a", 6))
    queue.enqueue(Counter("a", 6))
    assert [existing.carry for existing in given[2:]] == [Seen(1), None]


TIMES: dict[str, tuple[dt.timedelta, dt.timedelta, dt.timedelta | None, dt.timedelta]] = {
    "sooner": (HOUR, dt.timedelta(0), None, dt.timedelta(0)),
    "later": (dt.timedelta(0), HOUR, None, dt.timedelta(0)),
    "by decision": (dt.timedelta(0), dt.timedelta(0), 2 * HOUR, 2 * HOUR),
    "at once by decision": (HOUR, HOUR, dt.timedelta(-5), dt.timedelta(0)),
}


@pytest.mark.conformance(70)
@pytest.mark.parametrize(("first", "second", "delay", "expected"), TIMES.values(), ids=TIMES)
@pytest.mark.parametrize("decision", ["Replace", "Combine"])
def test_a_merged_job_is_due_at_the_earlier_time_or_as_decided(
    queue: venturi.Queue,
    first: dt.timedelta,
    second: dt.timedelta,
    delay: dt.timedelta | None,
    expected: dt.timedelta,
    decision: str,
) -> None:
    """The earlier of the two times counts, unless the decision names a delay from now."""
    decides(lambda task, existing: Replace(delay=delay) if decision == "Replace" else Combine(task, delay=delay))
    queue.enqueue(Counter("a"), delay=first)
    job = _job(queue, queue.enqueue(Counter("a"), delay=second))
    assert job.visible_at is not None
    assert abs(job.visible_at - job.created_at - expected) < dt.timedelta(seconds=1)
    if delay is not None:
        assert job.visible_at > job.created_at + expected


@pytest.mark.conformance(71)
def test_keep_leaves_every_row_as_it_is(queue: venturi.Queue, connect: Connect) -> None:
    """Neither body nor live row gets a new version, whatever the enqueue asks for."""
    decides(keeps)
    first = queue.enqueue(Counter("a", 1), delay=HOUR)
    before, versions = queue.job(first.id), _versions(queue, connect)
    kept = queue.enqueue(Counter("a", 2), priority=Priority.HIGH)
    assert kept == venturi.Receipt(first.id, "kept")
    assert queue.job(first.id) == before
    assert _versions(queue, connect) == versions


@pytest.mark.conformance(74)
def test_independent_leaves_two_jobs(queue: venturi.Queue) -> None:
    """Both are pending under one key, and no entry says that anything was merged."""
    decides(lambda task, existing: Independent())
    first, second = queue.enqueue(Counter("a", 1)), queue.enqueue(Counter("a", 2))
    assert second.action == "inserted"
    assert {job.id for job in queue.jobs(status="pending")} == {first.id, second.id}
    assert queue.journal(first.id) == queue.journal(second.id) == []


@pytest.mark.conformance(76)
def test_a_merged_entry_tells_the_old_and_the_new(queue: venturi.Queue, connect: Connect) -> None:
    """Decision, run, and old and new priority and time stand in the entry, which commits with the merge."""
    decides(lambda task, existing: {1: Keep(), 2: Replace(), 3: Combine(task)}[task.number])
    first = queue.enqueue(Counter("a"), delay=HOUR)
    before = queue.job(first.id)
    assert before is not None
    caller = connect()
    queue.enqueue(Counter("a", 1), conn=caller)
    queue.enqueue(Counter("a", 2), conn=caller, priority=Priority.HIGH)
    queue.enqueue(Counter("a", 3), conn=caller, priority=Priority.LOW)
    assert queue.journal(first.id) == []
    caller.commit()
    entries = queue.journal(first.id)
    assert [(e.outcome, e.note, e.run_no, e.failure_count) for e in entries] == [
        ("merged", note, 0, 0) for note in ("Keep", "Replace", "Combine")
    ]
    assert [e.evidence["priority"] for e in entries] == [[1, 1], [1, 0], [0, 2]]
    times = [[dt.datetime.fromisoformat(text) for text in e.evidence["visible_at"]] for e in entries]
    due = _job(queue, first).visible_at
    assert times == [[before.visible_at, before.visible_at], [before.visible_at, due], [due, due]]


RINGS: dict[str, tuple[Decide, dict[str, t.Any], int]] = {
    "kept": (keeps, {"priority": Priority.HIGH}, 0),
    "replaced as before": (replaces, {"delay": 2 * HOUR}, 0),
    "replaced by a lower tier": (replaces, {"delay": HOUR * 2, "priority": Priority.LOW}, 0),
    "replaced and sooner": (replaces, {}, 1),
    "replaced in a higher tier": (replaces, {"delay": HOUR * 2, "priority": Priority.HIGH}, 1),
    "combined as before": (lambda task, existing: Combine(task), {"delay": 2 * HOUR}, 0),
    "combined and sooner": (lambda task, existing: Combine(task, delay=dt.timedelta(0)), {"delay": 2 * HOUR}, 1),
    "postponed": (lambda task, existing: Replace(delay=HOUR * 3), {}, 0),
}


@pytest.mark.conformance(77)
@pytest.mark.parametrize(("by", "options", "rings"), RINGS.values(), ids=RINGS)
def test_a_merge_wakes_workers_only_when_it_gives_them_something(
    queue: venturi.Queue, connect: Connect, by: Decide, options: dict[str, t.Any], rings: int
) -> None:
    """A parked worker hears of a merge that makes the job due sooner or more urgent, and of no other."""
    decides(by)
    queue.enqueue(Counter("a"), delay=HOUR)
    bell = Bell(connect(autocommit=True), queue.schema)
    queue.enqueue(Counter("a"), **options)
    assert bell.rings() == rings


def _pausing(queue: venturi.Queue) -> None:
    """A handler that pauses for an hour and leaves a carry."""

    @queue.handler
    def counter(task: Counter, ctx: venturi.Context[Seen]) -> venturi.Outcome:
        ctx.carry.times = 7
        return Pause(HOUR)


def _job(queue: venturi.Queue, receipt: venturi.Receipt) -> venturi.Job:
    job = queue.job(receipt.id)
    assert job is not None
    return job


def _set(connect: Connect, queue: venturi.Queue, change: t.LiteralString) -> None:
    """Change the live rows by hand."""
    table = sql.Identifier(queue.schema, "live")
    connect(autocommit=True).execute(sql.SQL("UPDATE {} SET " + change).format(table))


def _versions(queue: venturi.Queue, connect: Connect) -> list[tuple[t.Any, ...]]:
    """Where and by whom each row of jobs and live was written."""
    query = sql.SQL("SELECT ctid::text, xmin::text FROM {} UNION ALL SELECT ctid::text, xmin::text FROM {}")
    tables = (sql.Identifier(queue.schema, name) for name in ("jobs", "live"))
    return connect().execute(query.format(*tables)).fetchall()
