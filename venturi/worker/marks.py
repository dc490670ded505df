"""Low-water marks: below which instant a lane need not be looked at, without threads, clocks or I/O.

Claimed jobs leave dead index entries at the head of their lane, which stay for as long as some old transaction can see
them. A claim that starts at the mark passes over them. The mark stays behind what was claimed, since transactions
commit late;
what commits later still is found by the claims that ignore marks: the first after a wake-up, the last before
sleeping, and one at least every second.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

__all__ = ["Marks"]


class Marks:
    """The marks of one worker's lanes. Losing them costs one slower claim.

    Args:
        lag: Seconds that a mark stays behind the oldest job of the last batch. Default: 1.
        sweep: Longest time, in seconds, between two claims that ignore the marks. Default: 1.
    """

    def __init__(self, lag: float = 1.0, sweep: float = 1.0) -> None:
        self._lag = lag
        self._sweep = sweep
        self._marks: dict[tuple[str, int], float] = {}
        self._swept = -math.inf

    def ignore(self) -> None:
        """Let the next claim look at everything."""
        self._swept = -math.inf

    def take(self, lanes: Iterable[tuple[str, int]], now: float) -> list[float]:
        """The marks for a claim at the instant ``now`` of a monotonic clock: seconds since 1970 for each (kind,
        tier).
        """
        if now - self._swept >= self._sweep:
            self._swept = now
            return [-math.inf for _ in lanes]
        return [self._marks.get(lane, -math.inf) for lane in lanes]

    def claimed(self, lane: tuple[str, int], eligible: float) -> None:
        """Note the oldest job that a claim took from the lane, by the second since 1970 in which it became due."""
        mark = eligible - self._lag
        if mark > self._marks.get(lane, -math.inf):
            self._marks[lane] = mark
