"""The rotation in the claim statement: shares, fallbacks and order, on the database."""

from __future__ import annotations

import typing as t

import pytest
from fixtures.claims import Taker, fill, registry
from fixtures.work import ended, working
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from psycopg import sql

import venturi
from venturi import Priority
from venturi.registry import Handler
from venturi.store.connections import Session
from venturi.worker.lanes import FEW
from venturi.worker.rotation import Rotation

HIGH, NORMAL, LOW = Priority.HIGH, Priority.NORMAL, Priority.LOW


@venturi.task("claim.one")
class One:
    number: int = 0


def numbered(number: int) -> type[t.Any]:
    """One task of many."""

    @venturi.task(f"claim.number{number}")
    class Numbered:
        pass

    return Numbered


NUMBERED = [numbered(number) for number in range(FEW + 2)]


def nothing(task: object) -> None:
    """A handler."""


def taker(schema: str, session: Session, rotation: Rotation, slots: int = 1) -> Taker:
    """Claims jobs of the first kind."""
    return Taker(schema, session, registry(Handler(nothing, task=One)), slots, rotation)


@pytest.mark.conformance(98)
@pytest.mark.parametrize("at_a_time", [1, 3, 8])
def test_claims_keep_the_shares_of_full_tiers(schema: str, session: Session, at_a_time: int) -> None:
    """With all tiers full any 16 consecutive claims hold 12 HIGH, 3 NORMAL and 1 LOW, however many at a time.

    Case 100.
    """
    for tier in Priority:
        fill(session, schema, 60, "claim.one", priority=tier, first=100 * tier)
    worker = taker(schema, session, Rotation(4), at_a_time)
    batches = [[each.priority for each in worker.take().claims] for _ in range(48 // at_a_time)]
    tiers = [tier for batch in batches for tier in batch]
    # The order inside a batch is that of the tiers, so that windows begin and end between batches where they can.
    ends = {sum(map(len, batches[:n])) for n in range(len(batches) + 1)}
    for begin in sorted(ends):
        if begin + 16 in ends:
            assert [tiers[begin : begin + 16].count(tier) for tier in Priority] == [12, 3, 1]
    assert [tiers.count(tier) for tier in Priority] == [36, 9, 3]


@pytest.mark.conformance(99)
def test_a_low_job_behind_four_high_ones_is_not_last(queue: venturi.Queue) -> None:
    """At ratio 2 with one slot LOW gets its turn before the HIGH ones are gone."""
    ran: list[int] = []

    @queue.handler
    def handle(task: One) -> None:
        ran.append(task.number)

    ids = [queue.enqueue(One(int(tier)), priority=tier).id for tier in (HIGH, HIGH, HIGH, HIGH, LOW)]
    with working(queue, concurrency=1, priority_ratio=2):
        for id_ in ids:
            ended(queue, id_)
    assert ran[-1] != LOW


@pytest.mark.conformance(101)
@pytest.mark.parametrize(
    ("position", "ready", "taken"),
    [
        (NORMAL, [HIGH, LOW], LOW),
        (NORMAL, [HIGH], HIGH),
        (LOW, [HIGH, NORMAL], HIGH),
        (LOW, [NORMAL], NORMAL),
        (HIGH, [NORMAL, LOW], NORMAL),
        (HIGH, [LOW], LOW),
    ],
)
def test_a_position_whose_tier_is_empty_falls_back(
    schema: str, session: Session, position: Priority, ready: list[Priority], taken: Priority
) -> None:
    """A NORMAL position takes LOW, else HIGH; a LOW one HIGH, else NORMAL; a HIGH one NORMAL, else LOW (case 100)."""
    for tier in ready:
        fill(session, schema, 3, "claim.one", priority=tier, first=10 * tier)
    start = {HIGH: 0, NORMAL: 3, LOW: 15}[position]
    (got,) = taker(schema, session, Rotation(4, start)).take().claims
    assert got.priority == taken


@pytest.mark.conformance(102)
def test_empty_claims_change_no_later_share(schema: str, session: Session) -> None:
    """A thousand claims that find nothing leave the rotation where it was (case 100)."""
    worker = taker(schema, session, Rotation(4, 3))
    with session.pipeline():
        for _ in range(1000):
            assert worker.take().claims == []
    for tier in Priority:
        fill(session, schema, 3, "claim.one", priority=tier, first=10 * tier)
    assert [each.priority for each in worker.take().claims] == [NORMAL]


FALLBACKS = {HIGH: (HIGH, NORMAL, LOW), NORMAL: (NORMAL, LOW, HIGH), LOW: (LOW, HIGH, NORMAL)}


def one_by_one(counts: list[int], rotation: Rotation, count: int) -> list[int]:
    """How many of each tier are claimed when the positions are filled one after another."""
    left = list(counts)
    for ahead in range(count):
        tier = next((tier for tier in FALLBACKS[rotation.tier(ahead)] if left[tier]), None)
        if tier is not None:
            left[tier] -= 1
    return [before - after for before, after in zip(counts, left, strict=True)]


@pytest.mark.conformance(101)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    counts=st.lists(st.integers(0, 6), min_size=3, max_size=3),
    ratio=st.sampled_from([None, 2, 3, 4]),
    start=st.integers(0, 15),
    count=st.integers(1, 16),
)
def test_a_batch_takes_what_claims_one_by_one_would_take(
    schema: str, session: Session, counts: list[int], ratio: int | None, start: int, count: int
) -> None:
    """However the tiers run short, a claim of many fills its positions as single claims would; no slot stays idle.

    Case 100.
    """
    rotation = Rotation(ratio, start)
    with session.transaction(force_rollback=True):
        for tier in Priority:
            fill(session, schema, counts[tier], "claim.one", priority=tier, first=100 * tier)
        claims = taker(schema, session, rotation, count).take().claims
    # The taker has moved the rotation on.
    expected = one_by_one(counts, Rotation(ratio, start), count)
    assert [sum(each.priority == tier for each in claims) for tier in Priority] == expected
    for tier in Priority:
        assert sorted(each.id.int & 0xFFF for each in claims if each.priority == tier) == [
            100 * tier + n for n in range(expected[tier])
        ], "the oldest of each tier"


class Group(t.NamedTuple):
    """Jobs of one lane, each of which became due so many seconds after the one before."""

    number: int
    tier: int
    jobs: int
    age: int
    step: int


GROUPS = st.builds(
    Group,
    number=st.integers(0, len(NUMBERED) - 1),
    tier=st.integers(0, 2),
    jobs=st.integers(1, 12),
    age=st.integers(80, 100),
    step=st.integers(0, 5),
)
ONE_EACH = [Group(number, HIGH, jobs=1, age=100 - number, step=0) for number in range(len(NUMBERED))]


@pytest.mark.conformance(98, 101)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(groups=ONE_EACH, ratio=None, count=len(NUMBERED) // 2)
@given(groups=st.lists(GROUPS, min_size=5, max_size=30), ratio=st.sampled_from([None, 2, 4]), count=st.integers(1, 40))
def test_of_many_kinds_the_oldest_of_each_tier_are_claimed(
    schema: str, session: Session, groups: list[Group], ratio: int | None, count: int
) -> None:
    """However the jobs are spread over the kinds, and though many became due at once."""
    table = sql.Identifier(schema, "live")
    handlers = registry(*(Handler(nothing, task=task) for task in NUMBERED))
    with session.transaction(force_rollback=True):
        for n, (number, tier, jobs, age, step) in enumerate(groups):
            times = {"start": f"-{age} s", "step": f"{step} s"}
            fill(session, schema, jobs, f"claim.number{number}", priority=tier, first=100 * n, **times)
        session.execute(sql.SQL("UPDATE {} SET visible_at = date_trunc('second', visible_at)").format(table))
        ready = session.execute(
            sql.SQL("SELECT priority, extract(epoch FROM visible_at)::float8 FROM {} ORDER BY visible_at").format(table)
        ).fetchall()
        claims = Taker(schema, session, handlers, count, Rotation(ratio, 0)).take().claims
    due = [[instant for priority, instant in ready if priority == tier] for tier in Priority]
    shares = one_by_one(list(map(len, due)), Rotation(ratio, 0), count)
    claimed = [[each.eligible for each in claims if each.priority == tier] for tier in Priority]
    assert claimed == [instants[:share] for instants, share in zip(due, shares, strict=True)]
