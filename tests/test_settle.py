"""How runs are recorded: what each ending does to the job, and to its entry."""

from __future__ import annotations

import collections.abc as cabc
import datetime as dt
import math
import threading
import time
import typing as t
import uuid

import attrs
import psycopg
import pytest
from fixtures.claims import PAST, alter, claim, claiming, completed, expire, strand
from fixtures.statements import Bell
from fixtures.waiting import eventually
from fixtures.work import ended, parked, until, working
from psycopg import sql

import venturi
from venturi.store.claiming import Ending
from venturi.store.connections import Session
from venturi.values import JournalOutcome

Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[tuple[t.Any, ...]]]

INSTANTLY = dt.timedelta(0)
LONG = dt.timedelta(hours=1)


@attrs.define
class Tally:
    """A carry that counts runs and can be made impossible to store."""

    runs: int = 0
    extra: str = ""


@venturi.task("settle.step", carry=Tally)
class Step:
    way: str = ""


def stepping(queue: venturi.Queue) -> list[int]:
    """A handler that ends as its task says; gives the carry's count that each run found."""
    found: list[int] = []

    @queue.handler
    def handle(task: Step, ctx: venturi.Context[Tally]) -> venturi.Outcome:
        found.append(ctx.carry.runs)
        ctx.carry.runs += 1
        match task.way:
            case "pause once" if ctx.run_count == 1:
                return venturi.Pause(LONG / 4)
            case "fail twice" if ctx.run_count < 3:
                raise venturi.RetryLater(INSTANTLY)
            case "fail":
                raise venturi.RetryLater(LONG)
            case "die":
                raise venturi.PermanentError("no such user")
            case "spoil and complete":
                ctx.carry.extra = t.cast(str, object())
            case "spoil and fail":
                ctx.carry.extra = t.cast(str, object())
                raise ValueError("the feed is down")
            case "spoil and pause":
                ctx.carry.extra = t.cast(str, object())
                return venturi.Pause(note="half way")
            case "pause then spoil" if ctx.run_count == 1:
                return venturi.Pause()
            case "pause then spoil":
                ctx.carry.extra = t.cast(str, object())
                raise ValueError("the feed is down")
            case "pause then die" if ctx.run_count == 1:
                return venturi.Pause()
            case "pause then die":
                raise venturi.PermanentError("gone")
            case _:
                pass
        return None

    return found


def ran(queue: venturi.Queue, way: str, *outcomes: JournalOutcome) -> tuple[venturi.Job, list[venturi.Entry]]:
    """Let a step run until its journal reads so; gives the job and its entries."""
    stepping(queue)
    id_ = queue.enqueue(Step(way)).id
    with working(queue):
        entries = until(queue, id_, *outcomes)
    job = queue.job(id_)
    assert job is not None
    return job, entries


@pytest.mark.conformance(112)
def test_a_completed_job_leaves_the_hot_table_and_stays_readable(queue: venturi.Queue, session: Session) -> None:
    """The live row is gone, status reads completed, finished_at is the entry's time, and the counts stay readable."""
    job, (entry,) = ran(queue, "", "completed")
    assert (job.status, job.run_count, job.failure_count) == ("completed", 1, 0)
    assert job.finished_at == entry.recorded_at
    count = session.execute(sql.SQL("SELECT count(*) FROM {}.live").format(sql.Identifier(queue.schema))).fetchone()
    assert count == (0,)


@pytest.mark.conformance(113)
def test_the_carry_of_a_completing_run_does_not_matter(queue: venturi.Queue) -> None:
    """It is neither encoded nor stored, so that one that cannot be encoded changes nothing (case 026)."""
    job, (entry,) = ran(queue, "spoil and complete", "completed")
    assert (job.status, job.carry, entry.note) == ("completed", None, None)


@pytest.mark.conformance(114)
def test_a_paused_job_keeps_its_counts_and_its_carry(queue: venturi.Queue, session: Session) -> None:
    """Pending, due exactly resume_in after the entry; the next run sees the carry and ends without failures."""
    found = stepping(queue)
    id_ = queue.enqueue(Step("pause once")).id
    with working(queue):
        (entry,) = until(queue, id_, "paused")
        job = queue.job(id_)
        assert job is not None
        assert job.visible_at is not None
        assert (job.status, job.run_count, job.failure_count, job.owner) == ("pending", 1, 0, None)
        assert (job.carry, job.lease_until) == ({"runs": 1, "extra": ""}, None)
        assert job.visible_at - entry.recorded_at == LONG / 4
        alter(session, queue.schema, id_, "visible_at", PAST)
        job = ended(queue, id_)
    assert (found, job.run_count, job.failure_count) == ([0, 1], 2, 0)


@pytest.mark.conformance(115)
def test_a_failed_run_counts_and_keeps_the_carry_as_it_left_it(queue: venturi.Queue) -> None:
    """Pending, one failure more, and the carry that the failing run had changed."""
    job, (entry,) = ran(queue, "fail", "retried")
    assert (job.status, job.failure_count, entry.failure_count) == ("pending", 1, 1)
    assert job.carry == {"runs": 1, "extra": ""}


@pytest.mark.conformance(116)
def test_two_failures_and_a_success(queue: venturi.Queue) -> None:
    """Completed with failure_count 2 and run_count 3; the third run saw what the second one left."""
    found = stepping(queue)
    id_ = queue.enqueue(Step("fail twice")).id
    with working(queue):
        entries = until(queue, id_, "retried", "retried", "completed")
    job = queue.job(id_)
    assert job is not None
    assert (job.status, job.failure_count, job.run_count) == ("completed", 2, 3)
    assert ([entry.run_no for entry in entries], [entry.failure_count for entry in entries]) == ([1, 2, 3], [1, 2, 2])
    assert found == [0, 1, 2]


@pytest.mark.conformance(117)
def test_a_dead_job_keeps_the_carry_that_was_stored_last(queue: venturi.Queue) -> None:
    """One failure more, finished_at set, and not the carry of the run that killed it."""
    job, (_, entry) = ran(queue, "pause then die", "paused", "dead")
    assert (job.status, job.failure_count, job.run_count, entry.note) == ("dead", 1, 2, "gone")
    assert job.finished_at == entry.recorded_at
    assert (job.carry, job.visible_at) == ({"runs": 1, "extra": ""}, None)


@pytest.mark.conformance(118)
@pytest.mark.parametrize("outcome", ["completed", "paused", "retried", "dead", "released", "cancelled"])
def test_a_settle_and_its_entry_are_one_transaction(
    queue: venturi.Queue, session: Session, outcome: JournalOutcome
) -> None:
    """Each settle appends exactly one entry with it; a rollback loses both."""
    id_ = queue.enqueue(Step()).id
    worker = claiming(queue.schema)
    (taken,) = claim(worker, session, "settle.step")
    ending = Ending(taken.key, taken.kind, taken.run_count, worker.owner, outcome)
    with session.transaction(force_rollback=True):
        assert worker.settle(session, [ending]) == []
    job = queue.job(id_)
    assert job is not None
    assert (job.status, queue.journal(id_)) == ("claimed", [])
    assert worker.settle(session, [ending]) == []
    (entry,) = queue.journal(id_)
    assert (entry.outcome, entry.run_no, entry.worker) == (outcome, 1, worker.owner)
    # What an earlier try has recorded is not recorded again.
    (answer,) = worker.settle(session, [ending])
    assert (answer.ours, answer.done) == (False, True)
    assert len(queue.journal(id_)) == 1


@pytest.mark.conformance(119)
def test_a_settle_that_does_not_own_the_claim_writes_nothing(queue: venturi.Queue, session: Session) -> None:
    """Another owner, an older run_count, or a job that is settled already: refused, and nothing changes (case 064)."""
    id_ = queue.enqueue(Step()).id
    worker, stranger = claiming(queue.schema), claiming(queue.schema)
    (old,) = claim(worker, session, "settle.step")
    assert worker.settle(session, [Ending(old.key, old.kind, old.run_count, worker.owner, "released")]) == []
    (taken,) = claim(worker, session, "settle.step")
    before = queue.job(id_)
    entries = queue.journal(id_)
    for ending in (
        Ending(taken.key, taken.kind, taken.run_count, stranger.owner, "completed"),
        Ending(taken.key, taken.kind, old.run_count, worker.owner, "dead"),
        Ending(str(uuid.uuid4()), taken.kind, 1, worker.owner, "completed"),
    ):
        (answer,) = worker.settle(session, [ending])
        assert (answer.ours, answer.done) == (False, False)
    assert (queue.job(id_), queue.journal(id_)) == (before, entries)
    assert worker.settle(session, completed([taken], worker.owner)) == []
    (answer,) = worker.settle(session, [Ending(taken.key, taken.kind, taken.run_count, worker.owner, "dead")])
    assert (answer.ours, answer.done) == (False, False)
    assert [entry.outcome for entry in queue.journal(id_)] == ["released", "completed"]


@pytest.mark.conformance(120)
def test_a_claim_whose_lease_is_over_may_still_be_settled(queue: venturi.Queue, session: Session) -> None:
    """As long as nobody recovered it."""
    id_ = queue.enqueue(Step()).id
    worker = claiming(queue.schema)
    taken = claim(worker, session, "settle.step")
    expire(session, queue.schema, id_)
    assert worker.settle(session, completed(taken, worker.owner)) == []
    job = queue.job(id_)
    assert job is not None
    assert job.status == "completed"


@venturi.task("settle.note")
class Noted:
    pass


@pytest.mark.conformance(125)
@pytest.mark.parametrize(
    ("text", "stored"),
    [("a\0b", "a\\u0000b"), ("a\ud800b", "a\\ud800b"), ("fine \N{SNOWMAN}", "fine \N{SNOWMAN}")],
)
def test_what_a_note_cannot_hold_becomes_visible(queue: venturi.Queue, text: str, stored: str) -> None:
    """NUL and lone surrogates become escapes, and the outcome stands (case 014)."""
    queue.handler(task=Noted)(lambda task: venturi.Completed(text))
    id_ = queue.enqueue(Noted()).id
    with working(queue):
        (entry,) = until(queue, id_, "completed")
    assert entry.note == stored


@pytest.mark.conformance(125)
def test_a_long_note_is_cut_and_marked(queue: venturi.Queue) -> None:
    """A note over 8 KiB keeps its beginning and end (case 016)."""
    queue.handler(task=Noted)(lambda task: venturi.Completed("begin " + "\N{SNOWMAN}" * 5000 + " end"))
    id_ = queue.enqueue(Noted()).id
    with working(queue):
        (entry,) = until(queue, id_, "completed")
    assert entry.note is not None
    assert len(entry.note.encode()) <= 8192
    assert entry.note.startswith("begin ")
    assert "[...]" in entry.note


@pytest.mark.conformance(126)
@pytest.mark.parametrize("evidence", [object(), "x" * 70_000, float("nan"), "\0"], ids=["object", "size", "nan", "nul"])
@pytest.mark.parametrize("fails", [False, True])
def test_evidence_that_cannot_be_stored_is_left_out(queue: venturi.Queue, evidence: object, fails: bool) -> None:
    """The entry says so, and the outcome stands (cases 001, 003, 014, 026)."""

    @queue.handler
    def handle(task: Noted, ctx: venturi.Context) -> venturi.Outcome:
        ctx.attach(thing=evidence)
        if fails:
            raise ValueError("the reason")
        return venturi.Completed("the reason")

    id_ = queue.enqueue(Noted()).id
    with working(queue):
        (entry,) = until(queue, id_, "retried" if fails else "completed")
    assert entry.evidence is None
    assert entry.note is not None
    assert "the reason" in entry.note
    assert "evidence is left out" in entry.note


@pytest.mark.conformance(127)
def test_a_failing_run_whose_carry_cannot_be_encoded_keeps_its_error_and_the_carry_from_before(
    queue: venturi.Queue,
) -> None:
    """The problem is added to the note (case 026)."""
    job, (_, entry) = ran(queue, "pause then spoil", "paused", "retried")
    assert (job.status, job.failure_count, job.carry) == ("pending", 1, {"runs": 1, "extra": ""})
    assert entry.note is not None
    assert entry.note.startswith("ValueError: the feed is down")
    assert "carry.extra" in entry.note


@pytest.mark.conformance(127)
def test_a_pause_whose_carry_cannot_be_encoded_ends_dead(queue: venturi.Queue) -> None:
    """Its note names the carry (case 026)."""
    job, (entry,) = ran(queue, "spoil and pause", "dead")
    assert (job.status, job.failure_count) == ("dead", 1)
    assert entry.note is not None
    assert "carry.extra" in entry.note


@attrs.define
class Touchy:
    """A carry that takes anything, and whose class does not let everything be read back."""

    value: object = None

    def __attrs_post_init__(self) -> None:
        if self.value == 13:
            raise SystemExit("unlucky")


@venturi.task("settle.touchy", carry=Touchy)
class Bearing:
    pass


SPOILT: dict[str, object] = {
    "NUL": "a\0b",
    "NUL in a key": {"a\0": 1},
    "NaN": math.nan,
    "infinity": [-math.inf],
    "object": object(),
    "exit": 13,
}


@pytest.mark.conformance(35, 127)
@pytest.mark.parametrize("fails", [False, True], ids=["pauses", "fails"])
@pytest.mark.parametrize("value", SPOILT.values(), ids=SPOILT)
def test_whatever_is_wrong_with_a_carry_the_run_is_settled_at_once(
    queue: venturi.Queue, value: object, fails: bool
) -> None:
    """A pause ends dead, a failure is retried with the carry from before; the note says why (cases 001, 003, 023, 026).

    It is so even if the code that encodes it exits.
    """

    @queue.handler
    def handle(task: Bearing, ctx: venturi.Context[Touchy]) -> venturi.Outcome:
        ctx.carry.value = value
        if fails:
            raise ValueError("the feed is down")
        return venturi.Pause()

    id_ = queue.enqueue(Bearing()).id
    with working(queue):
        (entry,) = until(queue, id_, "retried" if fails else "dead")
    job = queue.job(id_)
    assert job is not None
    assert (job.carry, job.failure_count) == (None, 1)
    assert "the carry cannot be stored: " in (entry.note or "")
    assert fails == ("the feed is down" in (entry.note or ""))


@pytest.mark.parametrize("count", [2**31 - 1, 2**53])
def test_counts_and_ids_have_room(queue: venturi.Queue, session: Session, count: int) -> None:
    """Neither 32 bits nor those of a float bound runs, failures or entries, on any way a run may end (case 078)."""
    seen: list[tuple[int, int, int]] = []

    @queue.handler
    def handle(task: Step, ctx: venturi.Context[Tally]) -> venturi.Outcome:
        seen.append((ctx.run_count, ctx.failure_count, len(ctx.history)))
        match len(seen):
            case 1:
                return venturi.Pause()
            case 2:
                raise ValueError("no")
            case 4:
                ctx.cancelled.wait(10)
                ctx.cancelled.check()
            case _:
                pass
        return None

    def again() -> None:
        alter(session, queue.schema, id_, "visible_at", PAST)

    schema = sql.Identifier(queue.schema)
    restart = sql.SQL("ALTER TABLE {}.journal ALTER COLUMN id RESTART WITH {}")
    session.execute(restart.format(schema, sql.Literal(count + 5)))
    id_ = queue.enqueue(Step()).id
    for column in ("run_count", "failure_count"):
        alter(session, queue.schema, id_, column, count)
    outcomes = ["paused", "retried", "recovered", "completed"]
    with working(queue, backstop=None):
        until(queue, id_, *outcomes[:2])
    strand(session, queue.schema, id_)
    with working(queue, backstop=None):
        until(queue, id_, *outcomes[:3])
        again()
        entries = until(queue, id_, *outcomes)
    assert [entry.run_no for entry in entries] == [count + n for n in (1, 2, 3, 4)]
    assert [entry.failure_count for entry in entries] == [count, count + 1, count + 2, count + 2]
    assert [entry.id for entry in entries] == [count + n for n in (5, 6, 7, 8)]
    assert seen == [(count + 1, count, 0), (count + 2, count, 1), (count + 4, count + 2, 3)]
    other = queue.enqueue(Step()).id
    alter(session, queue.schema, other, "run_count", count)
    with working(queue):
        eventually(lambda: len(seen) == 4)
    (entry,) = queue.journal(other)
    assert (entry.outcome, entry.run_no) == ("released", count + 1)
    assert [job.run_count for job in queue.jobs()] == [count + 1, count + 4]


@pytest.mark.conformance(129)
def test_a_settle_waits_for_no_batch(queue: venturi.Queue, connect: Connect) -> None:
    """With one of eight slots just finished and seven busy, its settle is visible to others within 50 ms."""
    go = threading.Event()
    finished: list[float] = []

    @queue.handler
    def handle(task: Step) -> None:
        if task.way == "wait":
            assert go.wait(10)
        finished.append(time.monotonic())

    watch = connect(autocommit=True)
    query = sql.SQL("SELECT count(*) FROM {}.journal WHERE job_id = %s").format(sql.Identifier(queue.schema))
    queue.enqueue_many([Step("wait")] * 7)
    took: list[float] = []
    with working(queue, concurrency=8, poll=60):
        for _ in range(5):
            id_ = queue.enqueue(Step()).id
            eventually(lambda id_=id_: watch.execute(query, (id_,)).fetchone() == (1,))  # type: ignore[misc]
            took.append(time.monotonic() - finished[-1])
        go.set()
    # Not all of them, since the machine may be busy with other things.
    assert sorted(took)[2] < 0.05


@pytest.mark.conformance(130)
@pytest.mark.parametrize("outcome", ["paused", "retried", "released", "recovered", "completed", "dead", "cancelled"])
def test_what_goes_back_to_pending_rings_the_bell(
    queue: venturi.Queue, session: Session, connect: Connect, outcome: JournalOutcome
) -> None:
    """A pause, a retry, a release and a recovery wake parked workers; completed, dead and cancelled jobs do not."""
    queue.enqueue(Step())
    worker = claiming(queue.schema)
    (taken,) = claim(worker, session, "settle.step")
    bell = Bell(connect(autocommit=True), queue.schema)
    ending = Ending(taken.key, taken.kind, taken.run_count, worker.owner, outcome, delay=1_000_000)
    assert worker.turn(session, [ending], None).unsettled == []
    assert bell.rings() == (outcome in ("paused", "retried", "released", "recovered"))


@pytest.mark.conformance(130)
def test_a_job_paused_by_a_worker_that_stops_runs_on_another_in_time(
    queue: venturi.Queue, dsn: str, connect: Connect
) -> None:
    """A worker that is parked with poll 60 s starts it as soon as it is due (case 091)."""
    started, go, ran = threading.Event(), threading.Event(), threading.Event()

    def pause(task: Step) -> venturi.Outcome:
        started.set()
        assert go.wait(10)
        return venturi.Pause(dt.timedelta(seconds=0.4))

    queue.handler(task=Step)(pause)
    other = venturi.Queue(queue.schema, dsn=dsn)
    other.handler(task=Step)(lambda task: ran.set())
    id_ = queue.enqueue(Step()).id
    with working(queue, concurrency=1) as first:
        assert started.wait(5)
        with working(other, poll=60):
            parked(connect(autocommit=True))
            first.stop()
            go.set()
            (entry,) = until(queue, id_, "paused")
            assert ran.wait(0.9)
            (_, last) = until(queue, id_, "paused", "completed")
    other.close()
    assert dt.timedelta(seconds=0.4) <= last.recorded_at - entry.recorded_at < dt.timedelta(seconds=0.9)
