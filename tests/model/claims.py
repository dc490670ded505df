"""What must be true of every claim."""

from __future__ import annotations

import collections.abc as cabc
import datetime as dt
import math

from model.actors import Member
from model.oracle import Job, Oracle
from venturi.store.claiming import Ask, Claim, Turn

__all__ = ["check_claim"]


def check_claim(oracle: Oracle, member: Member, ask: Ask | None, turn: Turn) -> None:
    """Take a turn's claims into the model, where they must be the right ones."""
    rooms = {kind: member.room(kind) for kind in member.kinds}
    free = min(member.slots - len(member.flight), sum(rooms.values()))
    if ask is None:
        assert free == 0
        return
    _check_sweep(oracle, member, ask)
    ready = oracle.ready(member.kinds)
    shown = _shown(ready, ask)
    most = min(free, sum(min(rooms[kind], _count(ready, kind)) for kind in member.kinds))
    least = min(free, sum(min(rooms[kind], _count(shown, kind)) for kind in member.kinds))
    assert least <= len(turn.claims) <= most
    assert turn.seen == len(turn.claims)
    if shown == ready:
        _check_choice(member, turn.claims, ready, rooms, free)
    for claim in turn.claims:
        _check_claimed(oracle, member, claim)
    member.take(turn.claims)


def _check_sweep(oracle: Oracle, member: Member, ask: Ask) -> None:
    """Everything is looked at once a second at least."""
    now = member.seconds(oracle.now)
    if set(ask.marks) == {-math.inf}:
        member.swept = now
    assert now - member.swept < 1


def _shown(ready: cabc.Sequence[Job], ask: Ask) -> list[Job]:
    marks = dict(zip(zip(ask.kinds, ask.tiers, strict=True), ask.marks, strict=True))
    return [job for job in ready if job.visible_at.timestamp() > marks[job.kind, job.priority] + 0.00001]


def _check_choice(
    member: Member, claims: cabc.Sequence[Claim], ready: cabc.Sequence[Job], rooms: dict[str, int], free: int
) -> None:
    taken = {claim.id for claim in claims}
    capped = any(rooms[kind] < min(free, _count(ready, kind)) for kind in member.kinds)
    for tier in range(3):
        for kinds in [(kind,) for kind in member.kinds] if capped else [member.kinds]:
            lane = [job for job in ready if job.priority == tier and job.kind in kinds]
            _check_oldest_first(lane, taken)
    got = [sum(claim.priority == tier for claim in claims) for tier in range(3)]
    if not capped:
        assert got == _shares(member, [sum(job.priority == tier for job in ready) for tier in range(3)], len(claims))
        return
    unlimited = [kind for kind in member.kinds if rooms[kind] == free]
    full = [sum(job.priority == tier and job.kind in unlimited for job in ready) >= free for tier in range(3)]
    if all(full):
        assert got == _shares(member, [free] * 3, free)


def _check_oldest_first(jobs: cabc.Sequence[Job], taken: cabc.Collection[object]) -> None:
    left = min((job.visible_at for job in jobs if job.id not in taken), default=None)
    assert all(left is None or job.visible_at <= left for job in jobs if job.id in taken)


def _shares(member: Member, ready: list[int], count: int) -> list[int]:
    """How many of each tier the next claims take: 12, 3 and 1 of 16, and another tier's turn where one is empty."""
    got = [0, 0, 0]
    for place in range(member.turned + 1, member.turned + 1 + count):
        own = 2 if place % 16 == 0 else 1 if place % 4 == 0 else 0
        order = {0: (0, 1, 2), 1: (1, 2, 0), 2: (2, 0, 1)}[own]
        tier = next(tier for tier in order if got[tier] < ready[tier])
        got[tier] += 1
    return got


def _check_claimed(oracle: Oracle, member: Member, claim: Claim) -> None:
    job = oracle.claim(claim.id, member.id)
    assert (claim.kind, claim.priority, claim.run_count) == (job.kind, job.priority, job.run_count)
    assert claim.failure_count == job.failure_count
    assert claim.carry == (None if job.carry is None else str(job.carry))
    assert math.isclose(claim.eligible, job.visible_at.timestamp(), abs_tol=0.00001)
    assert math.isclose(claim.waited, (oracle.now - job.visible_at) / dt.timedelta(seconds=1), abs_tol=0.00001)


def _count(jobs: cabc.Iterable[Job], kind: str) -> int:
    return sum(job.kind == kind for job in jobs)
