"""A queue under random load, and a model of it that must agree after every step.

Everything runs on one thread and one session, against a clock that the test sets, so that a failure repeats itself.
The short form is part of every test run; the long form takes some minutes and other steps each time:

    VENTURI_MODEL=long python -m pytest tests/test_model.py
"""

from __future__ import annotations

import datetime as dt
import os
import typing as t
import uuid
from collections import Counter

import psycopg
import pytest
from fixtures.rows import Rows, locked
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule, run_state_machine_as_test
from model.actors import CAPS, KINDS, Done, Member, Queue
from model.claims import check_claim
from model.oracle import BACKSTOP, START, End, Job, backoff
from model.steps import Steps, delta, numbers, seconds

import venturi
from venturi.errors import PermanentError, RetryLater
from venturi.store.claiming import Ending, Unsettled
from venturi.store.connections import Session
from venturi.worker.flight import Run

LONG = os.environ.get("VENTURI_MODEL") == "long"
PROFILE = settings(
    max_examples=1000 if LONG else 25,
    stateful_step_count=60 if LONG else 40,
    derandomize=not LONG,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    phases=[Phase.generate, Phase.shrink] if LONG else [Phase.generate],
)


class Model(Steps):
    """What workers do, and what must be true after every step."""

    # --- Workers

    @precondition(lambda self: len(self.members) < 3)
    @rule(kinds=st.sampled_from([KINDS, KINDS, ("plain",)]), slots=st.sampled_from([1, 3, 8, 16]), start=numbers)
    def spawn(self, kinds: tuple[str, ...], slots: int, start: int) -> None:
        self.members.append(Member(self.queue, kinds, slots, start % 16))

    @precondition(lambda self: self.members)
    @rule(which=numbers)
    def turn(self, which: int) -> None:
        """Settle what is done, and claim into what is free."""
        member = self.member(which)
        done, member.done = member.done, []
        ask = member.lanes.ask(member.seconds(self.oracle.now), [each.ending.kind for each in done])
        if not done and ask is None:
            return
        turn = member.claiming.turn(self.session, [each.ending for each in done], ask)
        self.settled([(each.ending, each.end) for each in done], turn.unsettled)
        member.lanes.ended(each.ending.kind for each in done)
        self.late += [(member, each) for each in done]
        check_claim(self.oracle, member, ask, turn)

    @precondition(lambda self: any(member.flight for member in self.members))
    @rule(
        which=numbers,
        how=st.sampled_from(
            ["complete", "complete", "pause", "fail", "fail", "later", "permanent", "exit", "wrong", "cancel", "stop"]
        ),
        wait=seconds,
        count=st.sampled_from([1, 1, 4, 16]),
    )
    def run(self, which: int, how: str, wait: int, count: int) -> None:
        """Run claims to their end."""
        member = self.one([member for member in self.members if member.flight], which)
        for _ in range(min(count, len(member.flight))):
            member.done.append(self._run(member, self.one(member.flight, which), how, wait))

    def _run(self, member: Member, run: Run, how: str, wait: int) -> Done:
        claim = run.claim
        ran: list[tuple[uuid.UUID, int, int, int]] = []

        def act(ctx: venturi.Context[t.Any, t.Any]) -> object:
            ran.append((ctx.id, ctx.run_count, ctx.failure_count, ctx.carry))
            ctx.carry += 1
            match how:
                case "pause":
                    return venturi.Pause(delta(wait))
                case "fail":
                    raise ValueError("no")
                case "later":
                    raise RetryLater(delta(wait))
                case "permanent":
                    raise PermanentError("never")
                case "exit":
                    raise SystemExit
                case "wrong":
                    return 42
                case "cancel":
                    if self.cancel_job(claim.id):
                        self._tell(member, [run])
                    raise ValueError("stopped")
                case _:
                    return None

        if how == "stop":
            run.signal.tell("shutdown")
        stopped = run.signal.reason
        ending = member.run(run, act)
        carry = int(claim.carry or 0)
        assert ran == ([] if stopped else [(claim.id, claim.run_count, claim.failure_count, carry)])
        assert "AssertionError" not in (ending.note or "")
        end = _expected(run, how, wait, carry, stopped)
        assert (ending.outcome, ending.key, ending.run_count) == (end.outcome, claim.key, claim.run_count)
        return Done(ending, end)

    @precondition(lambda self: self.members)
    @rule(which=numbers)
    def renew(self, which: int) -> None:
        member = self.member(which)
        self._renew(member, [(run.claim.key, run.claim.run_count) for run in member.flight])

    @precondition(lambda self: self.late)
    @rule(which=numbers)
    def renew_late(self, which: int) -> None:
        """A worker that has lost its claims renews one of them."""
        member, done = self.one(self.late, which)
        self._renew(member, [(done.ending.key, done.ending.run_count)])

    def _renew(self, member: Member, claims: list[tuple[str, int]]) -> None:
        expected = {(key, (stood := self.oracle.renew(uuid.UUID(key), run, member.id)), stood) for key, run in claims}
        assert set(member.claiming.renew(self.session, claims)) == expected

    @precondition(lambda self: self.members)
    @rule(which=numbers, how=st.sampled_from(["complete", "fail", "pause"]))
    def crash(self, which: int, how: str) -> None:
        """A worker is cut off; its handlers go on, and their results come late if ever."""
        member = self.member(which)
        self.members.remove(member)
        for run in list(member.flight):
            member.done.append(self._run(member, run, how, 0))
        self.late += [(member, done) for done in member.done]

    @precondition(lambda self: self.members)
    @rule(which=numbers)
    def stop(self, which: int) -> None:
        """A worker stops, and gives the claims of its stragglers back in one statement; they end all the same."""
        member = self.member(which)
        self.members.remove(member)
        endings = [
            Ending(run.claim.key, run.claim.kind, run.claim.run_count, member.id, "released") for run in member.flight
        ]
        self.settle([(ending, End("released")) for ending in endings])
        for run in list(member.flight):
            member.done.append(self._run(member, run, "complete", 0))
        self.late += [(member, done) for done in member.done]

    @precondition(lambda self: self.late)
    @rule(which=numbers, count=st.sampled_from([1, 3]))
    def settle_late(self, which: int, count: int) -> None:
        """Results that come after their worker was given up, or that are recorded already."""
        late = [self.one(self.late, which + n) for n in range(min(count, len(self.late)))]
        self.settle([(done.ending, done.end) for _, done in late])

    @precondition(lambda self: any(member.done for member in self.members))
    @rule(which=numbers)
    def settle_locked(self, which: int) -> None:
        """A row that another session holds at this moment is neither waited for nor lost."""
        done = self.one([done for member in self.members for done in member.done], which)
        id_, key = uuid.UUID(done.ending.key), (done.ending.key, done.ending.run_count)
        stands = self.oracle.stands(id_, done.ending.run_count, done.ending.owner)
        with psycopg.connect(self.session.info.dsn, password=self.session.info.password) as other:
            locked(other, Rows(other, self.queue.schema), id_)
            if stands:
                answers = self.recoverer.claiming.settle(self.session, [done.ending])
                assert answers == [Unsettled(*key, ours=True, done=False)]
            assert self.recoverer.claiming.renew(self.session, [key]) == [(key[0], False, False)]

    # --- Recovery

    @precondition(lambda self: any(job.owner for job in self.oracle.jobs.values()))
    @rule()
    def recover(self) -> None:
        lost = self.oracle.lost()
        self.recoverer.recover()
        for job in lost:
            assert job.owner is not None
            self.oracle.settle(job.id, job.run_count, job.owner, self.oracle.recovery(job), expired=True)

    @precondition(lambda self: self.oracle.lost())
    @rule()
    def decide_recovery(self) -> None:
        """Find what is lost, and leave it for later."""
        decided = self.recoverer.decide()
        lost = sorted(self.oracle.lost(), key=lambda job: job.lease_until or START)
        found = [self.oracle.jobs[uuid.UUID(claim.key)] for claim, _ in decided]
        assert {job.id for job in found} == {job.id for job in lost}
        assert [job.lease_until for job in found] == [job.lease_until for job in lost]
        for job, (_, ending) in zip(found, decided, strict=True):
            end = self.oracle.recovery(job)
            assert (ending.outcome, dt.timedelta(microseconds=ending.delay)) == (end.outcome, end.delay)
            self.decided.append((ending, end))

    @precondition(lambda self: self.decided)
    @rule()
    def do_decided(self) -> None:
        """Do what was decided, whatever has become of those claims, and as often as another worker did."""
        for each in self.decided:
            self.settle([each], expired=True)
        self.decided = self.decided[-5:]

    # --- Requests to cancel, and signs of life

    @precondition(lambda self: self.members)
    @rule(which=numbers)
    def tell(self, which: int) -> None:
        """A maintainer looks at the requests to cancel."""
        member = self.member(which)
        self._tell(member, member.flight)

    def _tell(self, member: Member, runs: list[Run]) -> None:
        held = {run.claim.id: run for run in runs}
        answers = member.claiming.cancels(self.session, list(map(str, held)))
        self.oracle.sweep()
        asked = {(id_, run) for id_ in held if id_ in self.oracle.jobs for run in self.oracle.jobs[id_].asked}
        told = {(uuid.UUID(key), number) for key, number in answers}
        assert told == asked
        for id_, number in told:
            if held[id_].claim.run_count >= number:
                held[id_].signal.tell("operator")

    @precondition(lambda self: self.members)
    @rule(which=numbers)
    def heartbeat(self, which: int) -> None:
        member = self.member(which)
        member.claiming.heartbeat(self.session)
        self.oracle.heartbeat(member.id, member.kinds)

    # --- What must hold at any time

    @invariant()
    def all_is_well(self) -> None:
        jobs = list(self.oracle.jobs.values())
        assert self.queue.views() == {job.id: job.view for job in jobs}
        assert self.queue.entries() == {job.id: job.entries for job in jobs if job.entries}
        assert self.queue.stats(conn=self.session) == self.oracle.stats()
        assert len(jobs) == self.oracle.enqueued - self.oracle.deleted
        self._each_run_has_one_entry(jobs)
        self._siblings_have_an_excuse(jobs)
        self._no_worker_holds_more_than_it_may(jobs)

    def _each_run_has_one_entry(self, jobs: list[Job]) -> None:
        for job in jobs:
            runs = [entry.run_no for entry in job.entries if entry.ends_run]
            assert runs == list(range(1, job.run_count + (job.status != "claimed")))

    def _siblings_have_an_excuse(self, jobs: list[Job]) -> None:
        pending = [job for job in jobs if job.status == "pending" and job.key is not None]
        assert all(n == 1 for n in Counter((job.kind, job.key) for job in pending if not job.excused).values())

    def _no_worker_holds_more_than_it_may(self, jobs: list[Job]) -> None:
        owners = Counter((job.owner, job.kind) for job in jobs if job.owner)
        for member in self.members:
            assert owners[member.id, "capped"] <= CAPS["capped"]
            assert sum(owners[member.id, kind] for kind in KINDS) <= member.slots

    def teardown(self) -> None:
        """Let one worker that only completes finish everything: nothing may be left, or have got lost."""
        self.members = []
        self.spawn(KINDS, 16, 0)
        for _ in range(1000):
            self.recover()
            self.turn(0)
            if not self.members[0].flight:
                if all(job.status not in ("pending", "claimed") for job in self.oracle.jobs.values()):
                    break
                self.tick(3600)
            for run in list(self.members[0].flight):
                self.members[0].done.append(self._run(self.members[0], run, "complete", 0))
        self.all_is_well()
        assert {view.status for view in self.queue.views().values()} <= {"completed", "dead", "cancelled"}


def _expected(run: Run, how: str, wait: int, carry: int, stopped: str | None) -> End:
    """How the run is to be recorded."""
    if stopped is not None:
        return End("cancelled" if stopped == "operator" else "released")
    if how in ("complete", "stop"):
        return End("completed")
    if how == "permanent" or (how == "cancel" and run.signal.by_operator):
        return End("dead" if how == "permanent" and not run.signal.by_operator else "cancelled")
    if how == "pause":
        return End("paused", delta(wait), carry + 1)
    failure = run.claim.failure_count + 1
    if failure >= BACKSTOP:
        return End("dead")
    kept = None if how in ("exit", "wrong") else carry + 1
    return End("retried", delta(wait) if how == "later" else backoff(failure), kept)


@pytest.mark.conformance(67, 86, 93, 94, 114, 115, 117, 118, 119, 120, 159, 163, 164, 165, 204, 207)
def test_a_queue_under_random_load_is_always_what_its_rules_say(schema: str, dsn: str, session: Session) -> None:
    """Whatever producers, workers, operators and the clock do, no job is lost, run twice or miscounted."""
    queue = Queue(schema, dsn, session)
    machine = t.cast("type[Model]", lambda: Model(queue))
    with queue.store.lent(session, queue.statements):
        run_state_machine_as_test(machine, settings=PROFILE)
