"""What one worker may claim: its lanes with their room, without threads, clocks or I/O.

A lane is one kind in one tier. A task's kind and its aliases share one cap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from venturi.registry import Bound
from venturi.store.claiming import Ask, Claim
from venturi.values import Priority
from venturi.worker.marks import Marks
from venturi.worker.rotation import Rotation

__all__ = ["Lanes"]

MOST = 1000
"""Jobs of one claim, so that a claim stays a short statement however many slots there are."""

FEW = 8
"""Kinds up to which one look at each lane, as deep as there is room, is cheaper than two."""


class Lanes:
    """Keeps exact count of the slots and the caps, and asks for no more than there is room for.

    Args:
        bound: The worker's handlers.
        slots: How many runs there may be at once.
        rotation: The turns of the tiers.
        marks: The low-water marks.
    """

    def __init__(self, bound: Iterable[Bound], slots: int, rotation: Rotation, marks: Marks) -> None:
        self._slots = slots
        self._rotation = rotation
        self._marks = marks
        self._running = 0
        self._caps: list[int] = []
        self._taken: list[int] = []
        self._task: dict[str, int] = {}
        for number, each in enumerate(bound):
            self._caps.append(each.handler.cap or slots)
            self._taken.append(0)
            self._task.update(dict.fromkeys(each.task.kinds, number))
        self._lanes = [(kind, int(tier)) for kind in self._task for tier in Priority]
        self._kinds = [kind for kind, _ in self._lanes]
        self._tiers = [tier for _, tier in self._lanes]
        self._tasks = [self._task[kind] for kind in self._kinds]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Every kind and alias."""
        return tuple(self._task)

    @property
    def running(self) -> int:
        """Runs that hold a slot."""
        return self._running

    def room(self) -> bool:
        """Whether anything could be claimed."""
        return self._running < self._slots and any(t < c for t, c in zip(self._taken, self._caps, strict=True))

    def all(self) -> tuple[Sequence[str], Sequence[int]]:
        """Kinds and tiers of all lanes."""
        return self._kinds, self._tiers

    def open(self) -> tuple[Sequence[str], Sequence[int]]:
        """Kinds and tiers of the lanes with room."""
        lanes = [
            lane for lane, task in zip(self._lanes, self._tasks, strict=True) if self._taken[task] < self._caps[task]
        ]
        return [kind for kind, _ in lanes], [tier for _, tier in lanes]

    def ask(self, now: float, ending: Sequence[str] = ()) -> Ask | None:
        """What to claim at the instant ``now`` of a monotonic clock; None when there is no room.

        Args:
            ending: The kinds of the runs that are settled by the same turn, whose room is free for its claim.
        """
        taken = list(self._taken)
        for kind in ending:
            taken[self._task[kind]] -= 1
        free = min(self._slots - self._running + len(ending), MOST)
        # None has less than no room, though a run that could not be settled yet may have been replaced already.
        rooms = [max(0, min(cap - used, free)) for cap, used in zip(self._caps, taken, strict=True)]
        # No more than there is room for, so that where one kind is capped the rotation goes by what it may claim.
        count = min(free, sum(rooms))
        if count <= 0:
            return None
        by_lane = [rooms[task] for task in self._tasks]
        return Ask(
            kinds=self._kinds,
            tiers=self._tiers,
            tasks=self._tasks,
            rooms=by_lane,
            depths=self._depths(by_lane, count),
            marks=self._marks.take(self._lanes, now),
            positions=self._rotation.positions(count),
            count=count,
        )

    def _depths(self, rooms: Sequence[int], count: int) -> Sequence[int]:
        """How far to look at each lane at first: where kinds are many and no cap limits them, twice an even share."""
        if len(self._task) <= FEW or min(rooms) < count:
            return rooms
        return [max(1, 2 * count // len(self._task))] * len(rooms)

    def claimed(self, claims: Sequence[Claim]) -> None:
        """Take the claims into account."""
        self._rotation.advance(len(claims))
        oldest: dict[tuple[str, int], Claim] = {}
        for claim in claims:
            self._running += 1
            self._taken[self._task[claim.kind]] += 1
            # They come sorted, so that the first of a lane is its oldest.
            oldest.setdefault((claim.kind, claim.priority), claim)
        for lane, claim in oldest.items():
            self._marks.claimed(lane, claim.eligible, claim.eligible + claim.waited)

    def ended(self, kinds: Iterable[str]) -> None:
        """Give back the room of one run of each of these kinds."""
        for kind in kinds:
            self._running -= 1
            self._taken[self._task[kind]] -= 1
