"""The worker's arithmetic over many steps, without a database: turns, caps, marks and delays.

The long form takes some minutes and other steps each time:

    VENTURI_MODEL=long python -m pytest tests/test_model_pure.py
"""

from __future__ import annotations

import datetime as dt
import math
import os
import typing as t
import uuid
from collections import Counter

import attrs
import pytest
from fixtures.claims import registry
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

import venturi
from venturi import Priority
from venturi.backoff import Backoff, jittered
from venturi.registry import Handler
from venturi.store.claiming import Ask, Claim
from venturi.worker.lanes import Lanes
from venturi.worker.marks import Marks
from venturi.worker.rotation import Rotation

FACTOR = 20 if os.environ.get("VENTURI_MODEL") == "long" else 1
COMMON = settings(
    derandomize=FACTOR == 1, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)  # fmt: skip
SLOTS = 12
CAPS = {"few": 2, "former few": 2, "some": 5, "any": SLOTS}
SWEEP = 1.0


@venturi.task("few", aliases=["former few"])
class Few: ...


@venturi.task("some")
class Some: ...


@venturi.task("any")
class Any: ...


def _nothing(task: object) -> None: ...


@attrs.define(eq=False)
class Waiting:
    """A pending job.

    Attributes:
        hidden: Since when a mark has hidden it; None when none does.
    """

    kind: str
    tier: int
    due: float
    hidden: float | None = None


class Worker(RuleBasedStateMachine):
    """Lanes, rotation and marks against a list of jobs."""

    def __init__(self) -> None:
        super().__init__()
        handlers: list[Handler[t.Any]] = [
            Handler(_nothing, task=Few, cap=2), Handler(_nothing, task=Some, cap=5), Handler(_nothing, task=Any)
        ]  # fmt: skip
        self.rotation = Rotation(4, 0)
        self.marks = Marks(sweep=SWEEP)
        self.lanes = Lanes(registry(*handlers), SLOTS, self.rotation, self.marks)
        self.now = 1000.0
        self.waiting: list[Waiting] = []
        self.marked: dict[tuple[str, int], float] = {}  # as far as the last claims that minded marks know them
        self.running: list[str] = []
        self.claimed = 0

    @rule(
        kind=st.sampled_from(sorted(CAPS)),
        tier=st.integers(0, 2),
        count=st.sampled_from([1, 3, 20]),
        late=st.sampled_from([0.0, 0.0, 0.4, 2.5, 60.0]),
    )
    def arrive(self, kind: str, tier: int, count: int, late: float) -> None:
        """Jobs are committed, some a good while after they became due."""
        self.waiting += [Waiting(kind, tier, self.now - late + n * 0.000001) for n in range(count)]

    @precondition(lambda self: self.marked)
    @rule(which=st.integers(0, 1000), below=st.sampled_from([0.0001, 30.0]))
    def arrive_behind_a_mark(self, which: int, below: float) -> None:
        """A job is committed so late that the lane's mark has passed it."""
        (kind, tier), mark = list(self.marked.items())[which % len(self.marked)]
        self.waiting.append(Waiting(kind, tier, mark - below))

    @rule(amount=st.sampled_from([0.0, 0.001, 0.1, 0.3, 0.7, 1.0, 5.0]))
    def tick(self, amount: float) -> None:
        self.now += amount

    @rule()
    def wake(self) -> None:
        """After a wake-up the next claim looks at everything."""
        self.marks.ignore()
        for job in self.waiting:
            job.hidden = -math.inf if job.hidden is not None else None

    @rule(settles=st.sampled_from([0, 2, SLOTS]), times=st.sampled_from([1, 8]), pause=st.sampled_from([0.0, 0.2]))
    def claim(self, settles: int, times: int, pause: float) -> None:
        """Settle some runs and claim into the room in one turn, some turns in a row."""
        for _ in range(times):
            self.now += pause
            ending, self.running = self.running[:settles], self.running[settles:]
            ask = self.lanes.ask(self.now, ending)
            chosen = [] if ask is None else self._choose(ask)
            self.lanes.ended(ending)
            self.lanes.claimed([_claim(job) for job in chosen])
            self.waiting = [job for job in self.waiting if job not in chosen]
            self.running += [job.kind for job in chosen]
            self.claimed += len(chosen)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, SLOTS))
    def end(self, which: int) -> None:
        self.lanes.ended([self.running.pop(which % len(self.running))])

    @invariant()
    def caps_and_slots_hold(self) -> None:
        """No more runs than slots, no more of a task than its cap, and no less room than there is."""
        held = _by_task(self.running)
        assert self.lanes.running == len(self.running) <= SLOTS
        assert held["few"] <= 2
        assert held["some"] <= 5
        assert self.lanes.room() == (len(self.running) < SLOTS)
        assert set(self.lanes.open()[0]) == {kind for kind in CAPS if held[_task(kind)] < CAPS[kind]}

    @invariant()
    def the_rotation_counts_claims(self) -> None:
        assert [self.rotation.tier(n) for n in range(16)] == [_tier(self.claimed + n) for n in range(16)]

    def _choose(self, ask: Ask) -> list[Waiting]:
        """What a database would claim."""
        lanes = list(zip(ask.kinds, ask.tiers, strict=True))
        marks = dict(zip(lanes, ask.marks, strict=True))
        rooms = dict(zip(ask.kinds, ask.rooms, strict=True))
        held = _by_task(self.running)
        free = SLOTS - len(self.running)
        assert {kind: rooms[kind] for kind in CAPS} == {k: min(CAPS[k] - held[_task(k)], free) for k in CAPS}
        assert ask.count == min(free, sum({_task(kind): rooms[kind] for kind in CAPS}.values()))
        assert sorted(place for places in ask.positions for place in places) == list(range(ask.count))
        self._note_hidden(marks)
        chosen: list[Waiting] = []
        for job in sorted(self.waiting, key=lambda job: (job.tier, job.due)):
            taken = _by_task([other.kind for other in chosen])
            if job.hidden is None and taken[_task(job.kind)] < rooms[job.kind] and len(chosen) < ask.count:
                chosen.append(job)
        return chosen

    def _note_hidden(self, marks: dict[tuple[str, int], float]) -> None:
        if (marked := {lane: mark for lane, mark in marks.items() if mark > -math.inf}) or not self.marked:
            self.marked = marked
        for job in self.waiting:
            if job.due >= marks[job.kind, job.tier]:
                job.hidden = None
            else:
                job.hidden = self.now if job.hidden is None else job.hidden
                assert self.now - job.hidden < SWEEP


def _claim(job: Waiting) -> Claim:
    return Claim(str(uuid.UUID(int=0)), job.kind, job.tier, 1, 0, None, job.due, 0.0, None, None)


def _task(kind: str) -> str:
    return kind.removeprefix("former ")


def _by_task(kinds: list[str]) -> Counter[str]:
    return Counter(map(_task, kinds))


def _tier(place: int, ratio: int = 4) -> Priority:
    """The tier of the n-th claim, written down once more."""
    last = (place + 1) % (ratio * ratio) == 0
    return Priority.LOW if last else Priority.NORMAL if (place + 1) % ratio == 0 else Priority.HIGH


def test_caps_turns_and_marks_hold_over_any_sequence_of_steps() -> None:
    """No cap or slot is exceeded or wasted, only claims move the turns, and no mark hides a job for a second."""
    run_state_machine_as_test(Worker, settings=settings(COMMON, max_examples=60 * FACTOR, stateful_step_count=60))


@pytest.mark.conformance(98, 99, 102)
@settings(COMMON, max_examples=100 * FACTOR)
@given(
    ratio=st.integers(2, 8),
    start=st.integers(0, 100),
    batches=st.lists(st.tuples(st.integers(0, 20), st.floats(0, 1)), min_size=40, max_size=40),
)
def test_every_window_of_full_tiers_has_the_same_shares(
    ratio: int, start: int, batches: list[tuple[int, float]]
) -> None:
    """However many are asked for and got at a time, each window of one cycle holds exactly each tier's share."""
    rotation = Rotation(ratio, start)
    tiers: list[Priority] = []
    for asked, share in batches:
        got = int(asked * share)
        places = rotation.positions(asked)
        tiers += [tier for place in range(got) for tier in Priority if place in places[tier]]
        rotation.advance(got)
    assert tiers == [_tier(start + n, ratio) for n in range(len(tiers))]
    cycle = ratio * ratio
    for begin in range(len(tiers) - cycle + 1):
        window = Counter(tiers[begin : begin + cycle])
        assert (window[Priority.LOW], window[Priority.NORMAL]) == (1, ratio - 1)


@pytest.mark.conformance(151)
@settings(COMMON, max_examples=2000 * FACTOR)
@given(
    job=st.uuids(),
    failure=st.integers(1, 79) | st.integers(1, 1_000_000),
    jitter=st.floats(0, 1),
    base=st.floats(0.001, 1000),
    longer=st.floats(1, 10_000),
)
def test_no_delay_leaves_its_bounds(job: uuid.UUID, failure: int, jitter: float, base: float, longer: float) -> None:
    """The delay lies between the share that jitter leaves and the whole, never falls before jitter, and is its own.

    Case 079.
    """
    curve = Backoff(dt.timedelta(seconds=base), dt.timedelta(seconds=base * longer))
    whole = curve.nanoseconds(failure)
    delay = jittered(curve, job, failure, jitter)
    assert whole * (1 - jitter) * (1 - 1e-12) - 1 <= delay <= whole
    assert whole <= curve.nanoseconds(failure + 1)
    assert delay == jittered(curve, job, failure, jitter)
    assert jittered(curve, job, failure, 0.0) == whole
