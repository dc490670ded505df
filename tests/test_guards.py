"""Every condition that guards a worker's statement, each by a test that fails without it: see tests/mutations.py."""

from __future__ import annotations

import datetime as dt
import math
import typing as t
import uuid

import pytest
from fixtures.claims import claiming
from fixtures.rows import Rows, locked, rows
from psycopg import sql

from venturi.store.claiming import Ask, Claiming, Ending, Turn, Unsettled, WorkerRow
from venturi.store.claiming_sql import LEFT, PRUNE_WORKERS
from venturi.store.connections import Session, run
from venturi.store.connections import connect as open_session
from venturi.store.sql import Sql
from venturi.values import JournalOutcome

__all__ = ["rows"]

ME, OTHER = uuid.uuid4(), uuid.uuid4()
LEASE = dt.timedelta(seconds=60)


@pytest.fixture
def me(rows: Rows, session: Session) -> Claiming:
    """A worker, whose session waits for no lock."""
    session.execute("SET lock_timeout = '200ms'")
    return claiming(rows.schema, id=ME)


def take(
    worker: Claiming,
    session: Session,
    *lanes: tuple[str, int],
    room: int = 10,
    count: int = 10,
    mark: float = -math.inf,
) -> Turn:
    """Claim from lanes whose tasks are as many as their kinds, the more urgent tier first."""
    kinds = sorted({kind for kind, _ in lanes})
    every = [room] * len(lanes)
    ask = Ask(
        kinds=[kind for kind, _ in lanes],
        tiers=[tier for _, tier in lanes],
        tasks=[kinds.index(kind) for kind, _ in lanes],
        rooms=every,
        depths=every,
        marks=[mark] * len(lanes),
        positions=(list(range(count)), [], []),
        count=count,
    )
    return worker.turn(session, [], ask)


def taken(turn: Turn) -> set[uuid.UUID]:
    """The jobs that a turn claimed."""
    return {claim.id for claim in turn.claims}


def end(id: uuid.UUID, outcome: JournalOutcome = "completed", *, run: int = 1, owner: uuid.UUID = ME) -> Ending:
    """One end of one run."""
    return Ending(str(id), "a", run, owner, outcome)


def left(id: uuid.UUID, *, ours: bool = False, done: bool = False) -> Unsettled:
    """The answer for an end of run 1 that was not recorded."""
    return Unsettled(str(id), 1, ours=ours, done=done)


class Gated(Claiming):
    """A worker whose statements stop at the gate, each after it has begun."""

    def __init__(self, rows: Rows) -> None:
        super().__init__(Sql(rows.schema, now=rows.gate()), WorkerRow(ME, "paper", 1, 1, (), LEASE))

    def recover(self, session: Session, ending: Ending) -> list[Unsettled]:
        """Recover without the bell, whose statement would stop too."""
        return [Unsettled(*row) for row in self._send(session, [ending], expired=True).fetchall()]


# --- Claim


@pytest.mark.conformance(88, 89)
def test_claim_takes_the_lanes_that_it_names(rows: Rows, me: Claiming, session: Session) -> None:
    """Another kind, and another tier of the same kind, stay pending."""
    wanted = rows.put("a", tier=1)
    rows.put("b", tier=1)
    rows.put("a", tier=0)
    assert taken(take(me, session, ("a", 1))) == {wanted}
    assert {id_ for id_, (owner, _, _) in rows.live().items() if owner} == {wanted}


def test_claim_gives_each_job_its_own_body(rows: Rows, me: Claiming, session: Session) -> None:
    """However many are claimed together."""
    jobs = {rows.put() for _ in range(3)}
    rows.run("UPDATE {schema}.jobs SET payload = to_jsonb(id::text) RETURNING 1")
    assert {(claim.id, claim.payload) for claim in take(me, session, ("a", 1)).claims} == {(j, f'"{j}"') for j in jobs}


@pytest.mark.conformance(89)
def test_claim_looks_no_further_than_now(rows: Rows, me: Claiming, session: Session) -> None:
    """A scheduled job of the most urgent tier is not claimed, and takes no ready job's turn."""
    rows.put("a", tier=0, due=60)
    ready = rows.put("a", tier=1)
    turn = take(me, session, ("a", 0), ("a", 1), count=1)
    assert taken(turn) == {ready}
    assert turn.seen == 1


def test_claim_passes_over_claims(rows: Rows, me: Claiming, session: Session) -> None:
    """A claimed job, its lease over or not, is not claimed again, and takes no ready job's turn."""
    rows.put("a", tier=0, owner=OTHER, run=1, lease=-60)
    ready = rows.put("a", tier=1)
    assert taken(take(me, session, ("a", 0), ("a", 1), count=1)) == {ready}


def test_claim_begins_at_the_mark(rows: Rows, me: Claiming, session: Session) -> None:
    """What became due before the mark is not looked at."""
    rows.put(due=-60)
    recent = rows.put(due=-1)
    instant = dt.datetime.now(dt.UTC).timestamp() - 30
    assert taken(take(me, session, ("a", 1), mark=instant)) == {recent}


def test_claims_come_by_tier_and_the_oldest_first(rows: Rows, me: Claiming, session: Session) -> None:
    """However their rows lie in the table: a lane's mark is taken from its first claim."""
    backwards = [rows.put(tier=tier, due=due) for tier in (2, 1, 0) for due in (-1, -2, -3)]
    turn = take(me, session, *(("a", tier) for tier in range(3)))
    assert [claim.id for claim in turn.claims] == backwards[::-1]


def test_claim_fills_no_more_than_the_room_and_the_count(rows: Rows, me: Claiming, session: Session) -> None:
    """A task's room holds for all of its tiers together, and the count for all tasks."""
    for tier in range(3):
        rows.put("a", tier=tier)
        rows.put("b", tier=tier)
    assert [claim.kind for claim in take(me, session, *((("a", n)) for n in range(3)), room=1).claims] == ["a"]
    lanes = [(kind, tier) for kind in "ab" for tier in range(3)]
    assert len(take(me, session, *lanes, room=2, count=3).claims) == 3


def test_claim_does_not_wait_for_a_row(rows: Rows, me: Claiming, session: Session, connect: t.Any) -> None:
    """A row that somebody locks is passed over at once."""
    held, free = rows.put(), rows.put()
    locked(connect(), rows, held)
    assert taken(take(me, session, ("a", 1))) == {free}


def test_claim_that_comes_second_takes_nothing(rows: Rows, session: Session) -> None:
    """A job that somebody claims while this claim looks for jobs is claimed once."""
    job = rows.put()
    slow = Gated(rows)
    change = "UPDATE {schema}.live SET owner = %s, lease_until = 'tomorrow', run_count = 1"
    turn = rows.meanwhile(lambda: take(slow, session, ("a", 1)), lambda: rows.run(change, OTHER))
    assert not turn.claims
    assert rows.live()[job] == (OTHER, 1, 0)


def test_claim_that_a_merge_overtakes_takes_nothing(rows: Rows, session: Session) -> None:
    """A job that a merge puts off while this claim looks for jobs stays pending."""
    job = rows.put()
    slow = Gated(rows)
    change = "UPDATE {schema}.live SET visible_at = 'tomorrow'"
    assert not rows.meanwhile(lambda: take(slow, session, ("a", 1)), lambda: rows.run(change)).claims
    assert rows.live()[job] == (None, 0, 0)


def test_next_due_looks_at_its_lanes_and_passes_over_claims(rows: Rows, me: Claiming, session: Session) -> None:
    """Only unclaimed jobs of the kinds and tiers asked for count."""
    rows.put("a", tier=1, due=-300, owner=OTHER, run=1)
    rows.put("b", tier=1, due=-200)
    rows.put("a", tier=0, due=-100)
    rows.put("a", tier=1, due=50)
    assert me.next_due(session, ["a"], [1]) == pytest.approx(50, abs=5)


# --- Settle


@pytest.mark.conformance(119)
def test_settle_ends_the_jobs_that_it_names(rows: Rows, me: Claiming, session: Session) -> None:
    """Claims of one worker with one run_count are told apart by the job."""
    jobs = [rows.put(owner=ME, run=1) for _ in range(3)]
    untouched = rows.put(owner=ME, run=1)
    assert me.settle(session, [end(jobs[0]), end(jobs[1], "paused"), end(jobs[2], "dead")]) == []
    assert rows.live() == {untouched: (ME, 1, 0), jobs[1]: (None, 1, 0)}
    assert rows.entries() == [(jobs[0], 0, 1), (jobs[1], 1, 1), (jobs[2], 3, 1)]
    assert rows.ids("dead") == {jobs[2]}


@pytest.mark.conformance(119, 207)
@pytest.mark.parametrize("outcome", ["completed", "paused", "dead"])
def test_settle_refuses_an_older_run(rows: Rows, me: Claiming, session: Session, outcome: JournalOutcome) -> None:
    """A result of run 1 does nothing to run 2 of the same job in the same worker, nor is that run called its own."""
    job = rows.put(owner=ME, run=2)
    assert me.settle(session, [end(job, outcome)]) == [left(job, ours=False, done=False)]
    assert rows.live() == {job: (ME, 2, 0)}
    assert rows.entries() == []


@pytest.mark.conformance(119)
@pytest.mark.parametrize("owner", [OTHER, None])
def test_settle_refuses_another_owner(rows: Rows, me: Claiming, session: Session, owner: uuid.UUID | None) -> None:
    """A result does nothing to the claim of another worker, nor to a job that nobody holds."""
    job = rows.put(owner=owner, run=1)
    assert me.settle(session, [end(job)]) == [left(job, ours=False, done=False)]
    assert rows.live() == {job: (owner, 1, 0)}
    assert rows.entries() == []


@pytest.mark.conformance(163, 165)
def test_recovery_refuses_a_lease_that_lasts(rows: Rows, me: Claiming, session: Session) -> None:
    """A claim that was renewed after the decision to recover it stays claimed, and is no business of the recovery."""
    job = rows.put(owner=OTHER, run=1, lease=60)
    ending = end(job, "recovered", owner=OTHER)
    assert me.settle(session, [ending], expired=True) == [left(job, ours=False, done=False)]
    assert rows.live() == {job: (OTHER, 1, 0)}


@pytest.mark.conformance(120)
def test_settle_minds_no_lease_of_its_own(rows: Rows, me: Claiming, session: Session) -> None:
    """A claim whose lease is over, and that nobody recovered, may still be settled."""
    job = rows.put(owner=ME, run=1, lease=-60)
    assert me.settle(session, [end(job)]) == []
    assert rows.live() == {}


@pytest.mark.conformance(119)
def test_settle_does_not_wait_for_a_row(rows: Rows, me: Claiming, session: Session, connect: t.Any) -> None:
    """A row that somebody locks is still ours, and is settled later; the others are settled now."""
    held, free = rows.put(owner=ME, run=1), rows.put(owner=ME, run=1)
    locked(connect(), rows, held)
    assert me.settle(session, [end(held), end(free)]) == [left(held, ours=True, done=False)]
    assert rows.entries() == [(free, 0, 1)]


def test_settle_says_of_an_unknown_job_that_it_is_not_ours(rows: Rows, me: Claiming, session: Session) -> None:
    """Another claim of this worker with the same run_count does not stand for it."""
    rows.put(owner=ME, run=1)
    gone = uuid.uuid4()
    assert me.settle(session, [end(gone)]) == [left(gone, ours=False, done=False)]


@pytest.mark.conformance(123)
@pytest.mark.parametrize(
    ("same", "done"),
    [((), True), (("job",), False), (("run",), False), (("worker",), False), (("outcome",), False)],
    ids=["this end", "another job", "another run", "another worker", "another outcome"],
)
def test_settle_knows_its_own_end_again(
    rows: Rows, me: Claiming, session: Session, same: tuple[str, ...], done: bool
) -> None:
    """Only an entry of this job, run, worker and outcome says that an earlier try was recorded."""
    job = rows.end(1)
    rows.run("UPDATE {schema}.journal SET worker = %s", OTHER if "worker" in same else ME)
    asked = end(uuid.uuid4() if "job" in same else job, "completed" if "outcome" in same else "paused",
                run=2 if "run" in same else 1)  # fmt: skip
    assert me.settle(session, [asked]) == [Unsettled(asked.key, asked.run_count, ours=False, done=done)]


@pytest.mark.conformance(131)
@pytest.mark.parametrize(
    ("outcome", "stays", "failures"),
    [("completed", False, 0), ("paused", True, 0), ("retried", True, 1), ("dead", False, 1), ("recovered", True, 1),
     ("released", True, 0), ("cancelled", False, 0)],
)  # fmt: skip
def test_settle_counts_failures_and_keeps_what_goes_on(
    rows: Rows, me: Claiming, session: Session, outcome: JournalOutcome, stays: bool, failures: int
) -> None:
    """Retried, dead and recovered are the failures; completed, dead and cancelled jobs leave the live table."""
    job = rows.put(owner=ME, run=1)
    assert me.settle(session, [end(job, outcome)]) == []
    assert rows.live() == ({job: (None, 1, failures)} if stays else {})
    assert rows.ids("dead") == ({job} if outcome == "dead" else set())
    assert rows.run("SELECT failure_count FROM {schema}.journal") == [(failures,)]


@pytest.mark.conformance(118)
@pytest.mark.parametrize("outcome", ["dead", "recovered"])
def test_settle_writes_nothing_of_a_row_that_changed_meanwhile(
    rows: Rows, session: Session, outcome: JournalOutcome
) -> None:
    """A version that was committed after the statement began cannot be changed by it, and gets no entry."""
    job = rows.put(owner=OTHER, run=1, lease=-60)
    slow = Gated(rows)
    ending = end(job, outcome, owner=OTHER)
    change = "UPDATE {schema}.live SET lease_until = lease_until + interval '1 s'"
    unsettled = rows.meanwhile(lambda: slow.recover(session, ending), lambda: rows.run(change))
    assert unsettled == [left(job, ours=True, done=False)]
    assert rows.live() == {job: (OTHER, 1, 0)}
    assert rows.entries() == []
    assert rows.ids("dead") == set()


@pytest.mark.conformance(165)
def test_two_recoveries_at_once_leave_one_entry(rows: Rows, me: Claiming, session: Session, dsn: str) -> None:
    """The second of two recoveries, which began before the first one ended, does nothing."""
    job = rows.put(owner=OTHER, run=1, lease=-60)
    slow = Gated(rows)
    ending = end(job, "recovered", owner=OTHER)
    other = open_session(dsn, name="venturi test")
    try:
        unsettled = rows.meanwhile(
            lambda: slow.recover(session, ending), lambda: me.settle(other, [ending], expired=True)
        )
    finally:
        other.close()
    assert len(unsettled) == 1
    assert rows.live() == {job: (None, 1, 1)}
    assert rows.entries() == [(job, 4, 1)]


# --- Renew


@pytest.mark.conformance(159)
@pytest.mark.parametrize(("owner", "number"), [(OTHER, 1), (ME, 2), (None, 1)], ids=["owner", "run", "pending"])
def test_renewal_refuses_what_is_not_its_claim(
    rows: Rows, me: Claiming, session: Session, owner: uuid.UUID | None, number: int
) -> None:
    """Another owner's claim, or a newer run, keeps its lease, and is not ours."""
    job = rows.put(owner=owner, run=number)
    before = rows.run("SELECT lease_until FROM {schema}.live")
    assert me.renew(session, [(str(job), 1)]) == [(str(job), False, False)]
    assert rows.run("SELECT lease_until FROM {schema}.live") == before


def test_renewal_renews_the_jobs_that_it_names(rows: Rows, me: Claiming, session: Session) -> None:
    """Another claim of this worker keeps its lease, and one that is gone is not ours."""
    other, job, gone = rows.put(owner=ME, run=1, lease=-5), rows.put(owner=ME, run=1, lease=-5), uuid.uuid4()
    named = [(str(job), 1), (str(gone), 1)]
    assert set(me.renew(session, named)) == {(str(job), True, True), (str(gone), False, False)}
    query = "SELECT id FROM {schema}.live WHERE lease_until < statement_timestamp()"
    assert rows.run(query) == [(other,)]


def test_renewal_does_not_wait_for_a_row(rows: Rows, me: Claiming, session: Session, connect: t.Any) -> None:
    """A row that somebody locks is still ours, and renewed next time."""
    job = rows.put(owner=ME, run=1)
    locked(connect(), rows, job)
    assert me.renew(session, [(str(job), 1)]) == [(str(job), False, True)]


# --- Recovery


@pytest.mark.conformance(163)
@pytest.mark.parametrize("everywhere", [True, False])
def test_only_claims_whose_lease_is_over_are_lost(rows: Rows, me: Claiming, session: Session, everywhere: bool) -> None:
    """The longest over comes first, each once, whatever its lane; pending and living ones are none."""
    rows.put(owner=OTHER, run=1, lease=30)
    rows.put()
    lost = [rows.put(kind, tier=tier, owner=OTHER, run=1, lease=-lease) for kind, tier, lease in
            (("a", 1, 10), ("b", 0, 30), ("a", 2, 20), ("b", 1, 40))]  # fmt: skip
    found = [uuid.UUID(claim.key) for claim in me.expired(session, everywhere=everywhere)]
    assert found == [lost[3], lost[1], lost[2], lost[0]]


@pytest.mark.conformance(169)
def test_a_request_to_cancel_counts_for_its_job_and_run(rows: Rows, me: Claiming, session: Session) -> None:
    """A request for another job, or a later run, does not make a recovery a cancellation."""
    asked, later, other = (rows.put(owner=OTHER, run=2, lease=-60) for _ in range(3))
    for job, number in ((asked, 1), (later, 3)):
        rows.run("INSERT INTO {schema}.cancels VALUES (%s, %s, statement_timestamp())", job, number)
    found = {uuid.UUID(claim.key): claim.cancel for claim in me.expired(session)}
    assert found == {asked: True, later: False, other: False}


@pytest.mark.conformance(166)
def test_one_batch_of_lost_claims_is_bounded(rows: Rows, me: Claiming, session: Session) -> None:
    """A hundred at a time."""
    for _ in range(101):
        rows.put(owner=OTHER, run=1, lease=-60)
    assert len(me.expired(session)) == 100


def test_only_workers_silent_for_ten_leases_are_removed(
    rows: Rows, me: Claiming, session: Session, connect: t.Any
) -> None:
    """A row that somebody locks is passed over; leaving removes the worker's own row alone."""
    for seen in ("-599 s", "-601 s", "-602 s"):
        rows.run(
            "INSERT INTO {schema}.workers VALUES (gen_random_uuid(), 'h', 1, 1, '{{}}', '60 s', now(), now() + %s)",
            seen,
        )
    other = connect()
    statement = "SELECT FROM {}.workers ORDER BY seen_at LIMIT 1 FOR UPDATE"
    other.execute(sql.SQL(statement).format(sql.Identifier(rows.schema)))
    run(session, Sql(rows.schema)(PRUNE_WORKERS))
    assert len(rows.run("SELECT id FROM {schema}.workers")) == 2
    other.rollback()
    run(session, Sql(rows.schema)(PRUNE_WORKERS))
    me.heartbeat(session)
    run(session, Sql(rows.schema)(LEFT), (ME,))
    assert len(rows.run("SELECT id FROM {schema}.workers")) == 1


def test_strays_are_the_own_claims_that_are_not_known(rows: Rows, me: Claiming, session: Session) -> None:
    """Whatever other workers hold, other lanes hold, or this worker knows of in that run is no stray."""
    unheard, known, rerun = (rows.put(owner=ME, run=run) for run in (1, 1, 2))
    rows.put(owner=OTHER, run=1)
    rows.put("other", owner=ME, run=1)
    rows.put(owner=ME, run=1, tier=2)
    found = me.strays(session, ["a"], [1], [(str(known), 1), (str(rerun), 1)])
    assert {(uuid.UUID(ending.key), ending.run_count, ending.outcome) for ending in found} == {
        (unheard, 1, "released"),
        (rerun, 2, "released"),
    }
