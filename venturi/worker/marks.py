"""Low-water marks: below which instant a lane need not be looked at, without threads, clocks or I/O.

Claimed jobs leave dead index entries at the head of their lane, which stay for as long as some old transaction can see
them. A claim that starts at the mark passes over them. The mark is the oldest job of the last batch, but stays behind
the clock, since transactions commit late; what commits later still is found by the claims that ignore marks: the first
after a wake-up, the last before sleeping, and one at least every second.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

__all__ = ["Marks"]


class Marks:
    """The marks of one worker's lanes. Losing them costs one slower claim.

    Args:
        lag: Seconds that a mark stays behind the database's clock. Default: 1.
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
        """The mark of each (kind, tier) in seconds since 1970, for a claim at ``now`` on a monotonic clock."""
        if now - self._swept >= self._sweep:
            self._swept = now
            return [-math.inf for _ in lanes]
        return [self._marks.get(lane, -math.inf) for lane in lanes]

    def claimed(self, lane: tuple[str, int], eligible: float, now: float) -> None:
        """Note when the oldest job that a claim took from the lane became due.

        Args:
            eligible: That instant, in seconds since 1970.
            now: The database's clock at the claim, likewise.
        """
        mark = min(eligible, now - self._lag)
        if mark > self._marks.get(lane, -math.inf):
            self._marks[lane] = mark
