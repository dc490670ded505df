"""The turns of the three tiers, without a database."""

from __future__ import annotations

import pytest

from venturi import Priority
from venturi.worker.rotation import Rotation

HIGH, NORMAL, LOW = Priority.HIGH, Priority.NORMAL, Priority.LOW


def turns(rotation: Rotation, count: int, at_a_time: int = 1) -> list[Priority]:
    """The tiers of the next claims, when the tiers are full and so many are claimed at a time."""
    tiers: list[Priority] = []
    while len(tiers) < count:
        places = rotation.positions(at_a_time)
        tiers += [tier for place in range(at_a_time) for tier in Priority if place in places[tier]]
        rotation.advance(at_a_time)
    return tiers[:count]


@pytest.mark.conformance(98)
@pytest.mark.parametrize("at_a_time", [1, 3, 8])
@pytest.mark.parametrize("start", [0, 5, 15])
def test_any_sixteen_claims_in_a_row_keep_the_shares(at_a_time: int, start: int) -> None:
    """At ratio 4 every window of 16 claims holds 12 HIGH, 3 NORMAL and 1 LOW, however many are claimed at a time.

    Case 100.
    """
    tiers = turns(Rotation(4, start), 96, at_a_time)
    for begin in range(80):
        window = tiers[begin : begin + 16]
        assert [window.count(tier) for tier in Priority] == [12, 3, 1]


@pytest.mark.conformance(99)
def test_ratio_two_goes_high_normal_high_low() -> None:
    """At ratio 2 the cycle is HIGH, NORMAL, HIGH, LOW."""
    assert turns(Rotation(2, 0), 8) == [HIGH, NORMAL, HIGH, LOW] * 2


@pytest.mark.conformance(100)
def test_without_a_ratio_every_turn_is_for_high() -> None:
    """priority_ratio None is strict: no turn is kept for NORMAL or LOW."""
    assert set(turns(Rotation(None), 50, 8)) == {HIGH}


@pytest.mark.conformance(102)
def test_empty_claims_do_not_move_the_rotation() -> None:
    """A thousand claims that found nothing change no later share."""
    idle, fresh = Rotation(4, 7), Rotation(4, 7)
    for _ in range(1000):
        idle.positions(8)
        idle.advance(0)
    assert turns(idle, 32) == turns(fresh, 32)


@pytest.mark.conformance(102)
def test_a_claim_that_got_less_than_it_asked_for_moves_on_by_what_it_got() -> None:
    """Asking for 8 and getting 3 leaves the rotation where 3 single claims would."""
    rotation = Rotation(4, 0)
    rotation.positions(8)
    rotation.advance(3)
    assert rotation.tier() is NORMAL


@pytest.mark.conformance(103)
def test_workers_start_at_different_positions() -> None:
    """Of 64 workers that claim one job each some take another tier than HIGH."""
    assert {Rotation(4).tier() for _ in range(64)} > {HIGH}
