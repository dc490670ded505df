"""The steps of producers, operators and the clock, and what all steps share."""

from __future__ import annotations

import datetime as dt
import typing as t
import uuid
from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

import venturi
from model.actors import CAPS, KINDS, Done, Member, Queue, Recoverer, task
from model.oracle import START, End, Job, Oracle, Request
from venturi.store.claiming import Ending, Unsettled

__all__ = ["Steps", "delta", "numbers", "seconds"]

numbers = st.integers(0, 10_000)
seconds = st.sampled_from([0, 1, 3, 20, 90])
priorities = st.sampled_from(venturi.Priority)
requests = st.builds(
    Request,
    kind=st.sampled_from(KINDS),
    number=st.integers(1, 9),
    key=st.sampled_from([None, None, "a", "b"]),
    decision=st.sampled_from(["replace", "keep", "combine", "independent"]),
    wait=st.sampled_from([None, None, 0, 30]),
)


def delta(value: float) -> dt.timedelta:
    """That many seconds."""
    return dt.timedelta(seconds=value)


class Steps(RuleBasedStateMachine):
    """Producers, operators and the clock, one step at a time.

    Attributes:
        late: Runs of workers that forgot them, that crashed or were told to give them back; their ends come late.
        decided: Recoveries that were decided, and not done at once.
    """

    def __init__(self, queue: Queue) -> None:
        super().__init__()
        self.queue = queue
        self.session = queue.session
        self.oracle = Oracle()
        self.members: list[Member] = []
        self.late: list[tuple[Member, Done]] = []
        self.decided: list[tuple[Ending, End]] = []
        queue.empty()
        queue.set_clock(self.oracle.now)
        self.recoverer = Recoverer(queue)

    # --- Producers

    @rule(request=requests, priority=priorities, delay=seconds)
    def enqueue(self, request: Request, priority: venturi.Priority, delay: int) -> None:
        receipt = self.queue.enqueue(task(request), conn=self.session, priority=priority, delay=delta(delay))
        due = self.oracle.now + delta(delay)
        self.oracle.enqueue([request], [(receipt.id, receipt.action)], int(priority), due)

    @rule(request=requests, priority=priorities, ahead=st.sampled_from([-60, 0, 7]))
    def enqueue_at(self, request: Request, priority: venturi.Priority, ahead: int) -> None:
        due = self.oracle.now + delta(ahead)
        receipt = self.queue.enqueue(task(request), conn=self.session, priority=priority, at=due)
        self.oracle.enqueue([request], [(receipt.id, receipt.action)], int(priority), due)

    @rule(batch=st.lists(requests, min_size=1, max_size=8), priority=priorities, delay=st.sampled_from([0, 0, 0, 3]))
    def enqueue_many(self, batch: list[Request], priority: venturi.Priority, delay: int) -> None:
        receipts = self.queue.enqueue_many(map(task, batch), conn=self.session, priority=priority, delay=delta(delay))
        due = self.oracle.now + delta(delay)
        self.oracle.enqueue(batch, [(r.id, r.action) for r in receipts], int(priority), due)

    @precondition(lambda self: len(self.oracle.jobs) < 200)
    @rule(kind=st.sampled_from(KINDS))
    def fill_all_tiers(self, kind: str) -> None:
        for priority in venturi.Priority:
            self.enqueue_many([Request(kind, n, None, "keep") for n in range(4 if kind in CAPS else 16)], priority, 0)

    # --- The clock

    @rule(amount=st.sampled_from([0.000001, 0.01, 0.5, 1, 3, 6, 11, 60, 3600]))
    def tick(self, amount: float) -> None:
        self.oracle.now += delta(amount)
        self.queue.set_clock(self.oracle.now)

    # --- Operators

    @precondition(lambda self: self.oracle.jobs)
    @rule(which=numbers)
    def cancel(self, which: int) -> None:
        self.cancel_job(self.job(which).id)

    def cancel_job(self, id_: uuid.UUID) -> bool:
        if id_ not in self.oracle.jobs:
            assert not self.queue.cancel(id_, conn=self.session)
            return False
        cancelled = self.oracle.cancel(id_)
        assert self.queue.cancel(id_, conn=self.session) == cancelled
        return cancelled

    @precondition(lambda self: self.oracle.jobs)
    @rule(which=numbers, delay=seconds)
    def requeue(self, which: int, delay: int) -> None:
        dead = [job for job in self.oracle.jobs.values() if job.status == "dead"]
        job = self.one(dead, which) if dead and which % 4 else self.job(which)
        expected = self.oracle.requeue(job.id, delta(delay))
        assert self.queue.requeue(job.id, delay=delta(delay), conn=self.session) == expected

    @rule(kind=st.sampled_from([None, *KINDS]), limit=st.sampled_from([1, 1000]))
    def requeue_many(self, kind: str | None, limit: int) -> None:
        dead = [job for job in self.oracle.jobs.values() if job.status == "dead" and kind in (None, job.kind)]
        oldest = min((job.finished_at for job in dead if job.finished_at), default=START)
        number = self.queue.requeue_many(kind=kind, limit=limit, conn=self.session)
        assert number == min(limit, len(dead))
        views = self.queue.views() if dead else {}
        for job in dead:
            if views[job.id].status != "dead":
                assert limit > 1 or job.finished_at == oldest
                self.oracle.requeue(job.id, delta(0))

    @precondition(lambda self: any(job.finished_at for job in self.oracle.jobs.values()))
    @rule(
        which=numbers,
        kind=st.sampled_from([None, *KINDS]),
        status=st.sampled_from([None, None, "completed", "dead", "cancelled"]),
        later=st.booleans(),
    )
    def cleanup(self, which: int, kind: str | None, status: t.Any, later: bool) -> None:
        instants = [job.finished_at for job in self.oracle.jobs.values() if job.finished_at]
        before = self.one(instants, which) + later * delta(0.000001)
        number = self.queue.cleanup(finished_before=before, kind=kind, status=status)
        assert number == self.oracle.cleanup(before, kind, status)

    # --- Helpers

    def settle(self, ends: list[tuple[Ending, End]], *, expired: bool = False) -> None:
        if ends:
            answers = self.recoverer.claiming.settle(self.session, [ending for ending, _ in ends], expired=expired)
            self.settled(ends, answers, expired=expired)

    def settled(self, ends: list[tuple[Ending, End]], answers: t.Any, *, expired: bool = False) -> None:
        expected: list[Unsettled] = []
        for ending, end in ends:
            answer = self.oracle.settle(uuid.UUID(ending.key), ending.run_count, ending.owner, end, expired=expired)
            if answer is not None:
                expected.append(Unsettled(ending.key, ending.run_count, *answer))
        assert Counter(answers) == Counter(expected)

    def one(self, options: list[t.Any], which: int) -> t.Any:
        return options[which % len(options)]

    def member(self, which: int) -> Member:
        return t.cast(Member, self.one(self.members, which))

    def job(self, which: int) -> Job:
        return t.cast(Job, self.one(list(self.oracle.jobs.values()), which))
