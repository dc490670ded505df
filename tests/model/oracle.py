"""What a queue must hold after every step, in plain Python: no SQL, no threads, and a clock that others set."""

from __future__ import annotations

import collections.abc as cabc
import datetime as dt
import typing as t
import uuid

import attrs

from venturi.values import KindStats, Stats

__all__ = ["BACKSTOP", "BASE", "CAP", "LEASE", "START", "End", "Entry", "Job", "Oracle", "Request", "View", "backoff"]

START = dt.datetime(2030, 1, 1, tzinfo=dt.UTC)
LATEST = dt.datetime(9999, 12, 1, tzinfo=dt.UTC)
LEASE = dt.timedelta(seconds=10)
LEAST = dt.timedelta(seconds=5)
MICROSECOND = dt.timedelta(microseconds=1)
BASE, CAP, BACKSTOP = 2, 9, 4
"""The backoff's base and cap in seconds, and the failures until a job is dead."""

RUNS = {"completed", "paused", "retried", "dead", "recovered", "released"}
FAILURES = {"retried", "dead", "recovered"}
FINISHED = {"completed", "dead", "cancelled"}

Answer: t.TypeAlias = tuple[bool, bool]
"""Of an end that was not recorded: whether the claim still stands, and whether this very end was recorded before."""


def backoff(failure: int) -> dt.timedelta:
    """The delay after that failure, without jitter."""
    here, following = 1, 1
    for _ in range(failure - 1):
        here, following = following, here + following
    return dt.timedelta(seconds=min(BASE * here, CAP))


@attrs.frozen
class Request:
    """One task to be enqueued.

    Attributes:
        decision: What its ``merge`` returns.
        wait: The decision's own delay, in seconds.
    """

    kind: str
    number: int
    key: str | None
    decision: str
    wait: int | None = None


@attrs.frozen
class Entry:
    """One entry of the journal, as far as the model knows it."""

    outcome: str
    run_no: int
    failure_count: int
    at: dt.datetime
    worker: uuid.UUID | None

    @property
    def ends_run(self) -> bool:
        """Whether it is the end of a run."""
        return self.outcome in RUNS or (self.outcome == "cancelled" and self.worker is not None)


@attrs.frozen
class View:
    """A job as an operator sees it."""

    kind: str
    status: str
    priority: int
    number: int
    key: str | None
    carry: int | None
    run_count: int
    failure_count: int
    created_at: dt.datetime
    visible_at: dt.datetime | None
    owner: uuid.UUID | None
    lease_until: dt.datetime | None
    finished_at: dt.datetime | None


@attrs.frozen
class End:
    """How a run ends.

    Attributes:
        carry: The carry to store; None keeps the stored one.
    """

    outcome: str
    delay: dt.timedelta = dt.timedelta(0)
    carry: int | None = None


@attrs.define
class Job:
    """One job.

    Attributes:
        excused: Whether it may stand beside another pending job of its key: it was inserted by Independent, was
            claimed and went back, or was requeued.
        asked: The runs of it that somebody asked to cancel.
    """

    id: uuid.UUID
    kind: str
    key: str | None
    priority: int
    number: int
    created_at: dt.datetime
    visible_at: dt.datetime
    excused: bool
    status: str = "pending"
    carry: int | None = None
    owner: uuid.UUID | None = None
    lease_until: dt.datetime | None = None
    run_count: int = 0
    failure_count: int = 0
    finished_at: dt.datetime | None = None
    entries: list[Entry] = attrs.field(factory=list[Entry])
    asked: set[int] = attrs.field(factory=set[int])

    @property
    def view(self) -> View:
        """What an operator is to see."""
        visible = None if self.status in FINISHED else self.visible_at
        carry = None if self.status in ("completed", "cancelled") else self.carry
        return View(
            self.kind, self.status, self.priority, self.number, self.key, carry, self.run_count, self.failure_count,
            self.created_at, visible, self.owner, self.lease_until, self.finished_at,
        )  # fmt: skip


class Oracle:
    """A queue by its rules."""

    def __init__(self) -> None:
        self.now = START
        self.jobs: dict[uuid.UUID, Job] = {}
        self.seen: dict[uuid.UUID, tuple[dt.datetime, frozenset[str]]] = {}
        self.enqueued = 0
        self.deleted = 0

    # --- Producers

    def enqueue(
        self,
        requests: cabc.Sequence[Request],
        receipts: cabc.Sequence[tuple[uuid.UUID, str]],
        priority: int,
        due: dt.datetime,
    ) -> None:
        """Enqueue as one batch; the receipts are what the queue said, and must be right."""
        assert len(receipts) == len(requests)
        for number, (request, receipt) in enumerate(zip(requests, receipts, strict=True)):
            at = min(max(due, self.now), LATEST) - (len(requests) - 1 - number) * MICROSECOND
            candidate = self._candidate(request)
            if candidate is None or request.decision == "independent":
                self._insert(request, receipt, priority, at, excused=candidate is not None)
            else:
                action = self._merge(candidate, request, priority, at)
                assert receipt == (candidate.id, action)

    def _candidate(self, request: Request) -> Job | None:
        found = [
            job for job in self.jobs.values()
            if job.key is not None and (job.kind, job.key, job.status) == (request.kind, request.key, "pending")
        ]  # fmt: skip
        return min(found, key=lambda job: (job.created_at, job.id)) if found else None

    def _insert(
        self, request: Request, receipt: tuple[uuid.UUID, str], priority: int, at: dt.datetime, *, excused: bool
    ) -> None:
        id_, action = receipt
        assert action == "inserted"
        assert id_ not in self.jobs
        self.jobs[id_] = Job(id_, request.kind, request.key, priority, request.number, self.now, at, excused)
        self.enqueued += 1

    def _merge(self, job: Job, request: Request, priority: int, at: dt.datetime) -> str:
        action = {"keep": "kept", "replace": "replaced", "combine": "combined"}[request.decision]
        if request.decision == "replace":
            job.number, job.carry, job.failure_count = request.number, None, 0
        elif request.decision == "combine":
            job.number += request.number
        if request.decision != "keep":
            job.priority = priority
            later = None if request.wait is None else self.now + dt.timedelta(seconds=request.wait)
            job.visible_at = min(job.visible_at, at) if later is None else later
        self._write(job, "merged")
        return action

    # --- Workers

    def ready(self, kinds: cabc.Collection[str]) -> list[Job]:
        """What may be claimed now."""
        return [j for j in self.jobs.values() if j.status == "pending" and j.visible_at <= self.now and j.kind in kinds]

    def claim(self, id_: uuid.UUID, owner: uuid.UUID) -> Job:
        """Claim a job, which must be ready."""
        job = self.jobs[id_]
        assert job.status == "pending"
        assert job.visible_at <= self.now
        job.status, job.owner, job.lease_until, job.excused = "claimed", owner, self.now + LEASE, True
        job.run_count += 1
        return job

    def stands(self, id_: uuid.UUID, run: int, owner: uuid.UUID, *, expired: bool = False) -> bool:
        """Whether a claim is still the one asked about."""
        job = self.jobs.get(id_)
        return (
            job is not None
            and (job.status, job.run_count, job.owner) == ("claimed", run, owner)
            and (not expired or (job.lease_until is not None and job.lease_until < self.now))
        )

    def renew(self, id_: uuid.UUID, run: int, owner: uuid.UUID) -> bool:
        """Renew a claim; whether it stood."""
        if not self.stands(id_, run, owner):
            return False
        self.jobs[id_].lease_until = self.now + LEASE
        return True

    def settle(self, id_: uuid.UUID, run: int, owner: uuid.UUID, end: End, *, expired: bool = False) -> Answer | None:
        """End a claim; None when that is recorded."""
        if not self.stands(id_, run, owner, expired=expired):
            job = self.jobs.get(id_)
            same = (end.outcome, run, owner)
            return False, job is not None and any((e.outcome, e.run_no, e.worker) == same for e in job.entries)
        job = self.jobs[id_]
        job.owner = job.lease_until = None
        job.failure_count += end.outcome in FAILURES
        job.carry = job.carry if end.carry is None else end.carry
        if end.outcome in FINISHED:
            job.status, job.finished_at = end.outcome, self.now
        else:
            job.status, job.visible_at = "pending", min(self.now + end.delay, LATEST)
        self._write(job, end.outcome, owner)
        return None

    def lost(self) -> list[Job]:
        """The claims whose lease is over."""
        return [j for j in self.jobs.values() if j.lease_until is not None and j.lease_until < self.now]

    def recovery(self, job: Job) -> End:
        """How a recovery is to end a claim."""
        if any(run <= job.run_count for run in job.asked):
            return End("cancelled")
        failure = job.failure_count + 1
        return End("dead") if failure >= BACKSTOP else End("recovered", max(LEAST, backoff(failure)))

    # --- Operators

    def cancel(self, id_: uuid.UUID) -> bool:
        """Cancel a pending job, ask for the end of a claimed one."""
        job = self.jobs[id_]
        if job.status == "claimed":
            job.asked.add(job.run_count)
        elif job.status == "pending":
            self._cancelled(job)
        else:
            return False
        return True

    def sweep(self) -> None:
        """Do what requests to cancel ask for, where their run has ended."""
        for job in self.jobs.values():
            if job.asked and job.status == "pending":
                self._cancelled(job)
            if job.status != "claimed":
                job.asked.clear()

    def _cancelled(self, job: Job) -> None:
        job.status, job.finished_at = "cancelled", self.now
        self._write(job, "cancelled")

    def requeue(self, id_: uuid.UUID, delay: dt.timedelta) -> bool:
        """Send a dead job back."""
        job = self.jobs[id_]
        if job.status != "dead":
            return False
        job.status, job.failure_count, job.finished_at, job.excused = "pending", 0, None, True
        job.visible_at = min(self.now + delay, LATEST)
        job.asked.clear()
        self._write(job, "requeued")
        return True

    def cleanup(self, before: dt.datetime, kind: str | None, status: str | None) -> int:
        """Forget finished jobs; how many."""
        gone = [
            job for job in self.jobs.values()
            if job.finished_at is not None and job.finished_at < before
            and kind in (None, job.kind) and status in (None, job.status)
        ]  # fmt: skip
        for job in gone:
            del self.jobs[job.id]
        self.deleted += len(gone)
        return len(gone)

    def _write(self, job: Job, outcome: str, worker: uuid.UUID | None = None) -> None:
        job.entries.append(Entry(outcome, job.run_count, job.failure_count, self.now, worker))

    # --- Statistics

    def heartbeat(self, worker: uuid.UUID, kinds: cabc.Iterable[str]) -> None:
        """A worker lives; those silent for ten leases are forgotten."""
        self.seen[worker] = (self.now, frozenset(kinds))
        self.seen = {id_: seen for id_, seen in self.seen.items() if seen[0] >= self.now - 10 * LEASE}

    def stats(self) -> Stats:
        """The counts."""
        working = [kinds for at, kinds in self.seen.values() if at > self.now - LEASE]
        kinds: dict[str, KindStats] = {}
        for kind in {job.kind for job in self.jobs.values() if job.status in ("pending", "claimed", "dead")}:
            jobs = [job for job in self.jobs.values() if job.kind == kind]
            ready = [job.visible_at for job in jobs if job.status == "pending" and job.visible_at <= self.now]
            pending = sum(job.status == "pending" for job in jobs)
            claimed, dead = (sum(job.status == status for job in jobs) for status in ("claimed", "dead"))
            oldest = self.now - min(ready) if ready else None
            served = any(kind in each for each in working)
            kinds[kind] = KindStats(len(ready), pending - len(ready), claimed, dead, oldest, served)
        unserved = tuple(sorted(kind for kind, counts in kinds.items() if counts.ready and not counts.served))
        return Stats(kinds, unserved, len(working))
