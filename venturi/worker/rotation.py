"""Weighted turns of the three priority tiers, without threads, clocks or I/O."""

from __future__ import annotations

import random

from venturi.values import Priority

__all__ = ["Rotation"]


class Rotation:
    """Says which tier each of the next claims is meant for.

    At ratio r a cycle has r * r positions: every r * r-th is LOW, every other r-th NORMAL, the rest HIGH. At ratio 4
    that is 12 HIGH, 3 NORMAL and 1 LOW of 16. Only successful claims move it on, so that polling an empty queue
    shifts no share.

    Args:
        ratio: At least 2; None is strict: always the most urgent first.
        start: First position. Default: None, a random one, so that workers that claim little do not all take HIGH.
    """

    def __init__(self, ratio: int | None, start: int | None = None) -> None:
        self._ratio = ratio
        cycle = 1 if ratio is None else ratio * ratio
        self._position = random.randrange(cycle) if start is None else start % cycle

    def tier(self, ahead: int = 0) -> Priority:
        """The tier of the position that many claims ahead."""
        if self._ratio is None:
            return Priority.HIGH
        place = self._position + ahead + 1
        if place % (self._ratio * self._ratio) == 0:
            return Priority.LOW
        return Priority.NORMAL if place % self._ratio == 0 else Priority.HIGH

    def positions(self, count: int) -> tuple[list[int], list[int], list[int]]:
        """The places of HIGH, of NORMAL and of LOW among the next ``count`` claims, from 0."""
        places: tuple[list[int], list[int], list[int]] = ([], [], [])
        for ahead in range(count):
            places[self.tier(ahead)].append(ahead)
        return places

    def advance(self, claimed: int) -> None:
        """Move on by that many successful claims."""
        if self._ratio is not None:
            self._position = (self._position + claimed) % (self._ratio * self._ratio)
