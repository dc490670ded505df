"""Low-water marks and lanes: what a worker asks for, without a database."""

from __future__ import annotations

import math
import uuid

import pytest
from fixtures.claims import registry

import venturi
from venturi import Priority
from venturi.registry import Handler
from venturi.store.claiming import Claim
from venturi.task import task_type
from venturi.worker.lanes import Lanes
from venturi.worker.marks import Marks
from venturi.worker.rotation import Rotation

LANE, OTHER = ("a", 1), ("b", 1)


@venturi.task("marks.mail", aliases=("marks.letter",))
class Mail:
    pass


@venturi.task("marks.feed")
class Feed:
    pass


def nothing(task: object) -> None:
    """A handler."""


def claim(kind: str, priority: Priority = Priority.NORMAL, eligible: float = 0.0) -> Claim:
    """A claim of the kind, at the instant 100."""
    return Claim(str(uuid.uuid4()), kind, priority, 1, 0, None, eligible, 100.0 - eligible, "{}", None)


def lanes(slots: int, cap: int | None = None) -> Lanes:
    """The lanes of two tasks, the first of them with an alias and maybe a cap."""
    handlers = registry(Handler(nothing, task=Mail, cap=cap), Handler(nothing, task=Feed))
    return Lanes(handlers, slots, Rotation(4, 0), Marks())


def swept(marks: Marks, now: float) -> None:
    """Let the claim that ignores all marks pass."""
    marks.take([LANE], now)


def test_a_mark_is_the_oldest_job_of_the_last_batch() -> None:
    """The next claim starts where the last one did, in a backlog that is older than the lag; other lanes have marks of
    their own.
    """
    marks = Marks(lag=1.0, sweep=1.0)
    swept(marks, 10.0)
    marks.claimed(LANE, 500.0, now=501.0)
    assert marks.take([LANE, OTHER], 10.5) == [500.0, -math.inf]


@pytest.mark.conformance(57)
def test_a_mark_stays_behind_the_clock() -> None:
    """What became due in the last second is never passed over, since transactions commit late."""
    marks = Marks(lag=1.0, sweep=1.0)
    swept(marks, 10.0)
    marks.claimed(LANE, 500.0, now=500.2)
    assert marks.take([LANE], 10.5) == [499.2]


def test_a_mark_never_falls() -> None:
    """A late job that a sweep found does not pull the mark back over the dead rows."""
    marks = Marks()
    swept(marks, 10.0)
    marks.claimed(LANE, 500.0, now=600.0)
    marks.claimed(LANE, 100.0, now=600.1)
    assert marks.take([LANE], 10.5) == [500.0]


@pytest.mark.conformance(57)
def test_marks_are_ignored_once_a_second_and_when_asked() -> None:
    """No mark hides for longer than a second what commits late, and a wake-up looks at everything."""
    marks = Marks(sweep=1.0)
    swept(marks, 10.0)
    marks.claimed(LANE, 500.0, now=600.0)
    assert marks.take([LANE], 10.99) == [500.0]
    assert marks.take([LANE], 11.0) == [-math.inf]
    assert marks.take([LANE], 11.1) == [500.0]
    marks.ignore()
    assert marks.take([LANE], 11.2) == [-math.inf]
    assert marks.take([LANE], 11.3) == [500.0]


def test_a_batch_moves_the_mark_of_its_lane_to_its_oldest_job() -> None:
    """What the batch took later than its oldest job is no reason to pass over anything in between."""
    worker = lanes(slots=8)
    worker.ask(0.0)
    worker.claimed([claim("marks.feed", eligible=50.0), claim("marks.feed", eligible=70.0)])
    ask = worker.ask(0.1)
    assert ask is not None
    marks = dict(zip(zip(ask.kinds, ask.tiers, strict=True), ask.marks, strict=True))
    assert marks["marks.feed", 1] == 50.0
    assert set(marks.values()) == {50.0, -math.inf}


@pytest.mark.conformance(95)
def test_a_claim_asks_for_no_more_than_the_free_slots() -> None:
    """Running and asked for together are never more than the slots; with none free nothing is asked."""
    worker = lanes(slots=3)
    worker.claimed([claim("marks.feed")])
    ask = worker.ask(0.0)
    assert ask is not None
    assert ask.count == 2
    worker.claimed([claim("marks.feed"), claim("marks.mail")])
    assert worker.ask(0.0) is None
    assert not worker.room()
    # A run that is settled by the same statement makes room for the claim in it.
    ask = worker.ask(0.0, ending=["marks.feed"])
    assert ask is not None
    assert ask.count == 1


@pytest.mark.conformance(110)
def test_a_kind_and_its_aliases_share_one_cap() -> None:
    """Room that a job of the alias takes is gone for the kind itself, in every tier."""
    worker = lanes(slots=8, cap=2)
    worker.claimed([claim("marks.letter", Priority.LOW)])
    ask = worker.ask(0.0)
    assert ask is not None
    rooms = dict(zip(zip(ask.kinds, ask.tiers, strict=True), ask.rooms, strict=True))
    assert {rooms[kind, tier] for kind in task_type(Mail).kinds for tier in range(3)} == {1}
    assert {rooms["marks.feed", tier] for tier in range(3)} == {7}


def test_the_lanes_of_a_kind_at_its_cap_are_closed() -> None:
    """They are neither claimed from nor waited for."""
    worker = lanes(slots=8, cap=1)
    worker.claimed([claim("marks.mail")])
    assert set(worker.open()[0]) == {"marks.feed"}
    worker.ended(["marks.mail"])
    assert set(worker.open()[0]) == {"marks.mail", "marks.letter", "marks.feed"}


def test_a_replaced_run_that_could_not_be_settled_leaves_no_negative_room() -> None:
    """A settle that found its row locked may leave a kind one over its cap for a moment: it then has no room."""
    worker = lanes(slots=8, cap=1)
    worker.claimed([claim("marks.mail")])
    assert worker.ask(0.0, ending=["marks.mail"]) is not None
    worker.claimed([claim("marks.mail")])
    ask = worker.ask(0.0)
    assert ask is not None
    assert min(ask.depths) == min(ask.rooms) == 0


def test_the_rotation_goes_by_what_capped_kinds_may_claim() -> None:
    """With room for one run of the only kind, one position is handed out, not one for each free slot."""
    worker = Lanes(registry(Handler(nothing, task=Mail, cap=1)), 8, Rotation(4, 3), Marks())
    ask = worker.ask(0.0)
    assert ask is not None
    assert ask.count == 1
    assert ask.positions == ([], [0], [])
