"""The records that venturi hands out: frozen, typed, without behaviour."""

from __future__ import annotations

import datetime as dt
import enum
import typing as t
import uuid
from collections.abc import Mapping

import attrs

__all__ = [
    "Action",
    "Entry",
    "Job",
    "JournalOutcome",
    "KindStats",
    "Priority",
    "Receipt",
    "Released",
    "Report",
    "Stats",
    "Status",
]

Action: t.TypeAlias = t.Literal["inserted", "kept", "replaced", "combined"]
Status: t.TypeAlias = t.Literal["pending", "claimed", "completed", "dead", "cancelled"]
JournalOutcome: t.TypeAlias = t.Literal[
    "completed", "paused", "retried", "dead", "recovered", "released", "merged", "cancelled", "requeued"
]


class Priority(enum.IntEnum):
    """The three tiers; a lower number is more urgent."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


@attrs.frozen
class Receipt:
    """What an enqueue did.

    Attributes:
        id: The job that now stands for the task: a new one, or the pending one it was merged into.
        action: ``inserted``, ``kept``, ``replaced`` or ``combined``.
    """

    id: uuid.UUID
    action: Action


@attrs.frozen
class Job:
    """One job as it stands, decodable or not. All times are aware, in UTC.

    Attributes:
        payload: The stored JSON, undecoded: usually a dict, by hand anything.
        carry: The stored carry, undecoded; None when it was never set or is null.
        run_count: Runs started so far.
        visible_at: When a pending job is due; None once it is finished.
        owner: The worker that holds the claim; None unless claimed.
        finished_at: When it completed, died or was cancelled; None while unfinished.
    """

    id: uuid.UUID
    kind: str
    status: Status
    priority: Priority
    payload: t.Any = attrs.field(repr=False)
    carry: t.Any = attrs.field(repr=False)
    dedup_key: str | None
    run_count: int
    failure_count: int
    created_at: dt.datetime
    visible_at: dt.datetime | None
    owner: uuid.UUID | None
    lease_until: dt.datetime | None
    finished_at: dt.datetime | None


@attrs.frozen
class Entry:
    """One entry of the journal: a run, or something else that happened to a job.

    Attributes:
        run_no: The run it belongs to; 0 only for a job that never ran.
        duration: How long the handler ran; None for what is no run.
        traceback: The last 16 KiB of a failure's traceback; None otherwise.
        evidence: What ``ctx.attach`` recorded, or for a merge the old and new priority and time.
    """

    id: int
    job_id: uuid.UUID
    kind: str
    run_no: int
    failure_count: int
    outcome: JournalOutcome
    recorded_at: dt.datetime
    duration: dt.timedelta | None
    worker: uuid.UUID | None
    note: str | None
    traceback: str | None = attrs.field(repr=False)
    evidence: t.Any = attrs.field(repr=False)


@attrs.frozen
class KindStats:
    """How many jobs of one kind there are, by what they wait for.

    Attributes:
        ready: Pending and due.
        scheduled: Pending and due later.
        oldest_ready: How long the oldest ready job has been due; None when none is ready.
        served: Whether a live worker handles this kind.
    """

    ready: int = 0
    scheduled: int = 0
    claimed: int = 0
    dead: int = 0
    oldest_ready: dt.timedelta | None = None
    served: bool = False


@attrs.frozen
class Stats:
    """One consistent snapshot of a queue.

    Attributes:
        kinds: The counts of every kind that has unfinished or dead jobs.
        unserved: Kinds with ready jobs that no live worker handles, sorted.
        workers: Live workers.
    """

    kinds: Mapping[str, KindStats]
    unserved: tuple[str, ...]
    workers: int


@attrs.frozen
class Released:
    """A claim that a stopping worker gave back while its handler still ran."""

    id: uuid.UUID
    kind: str
    thread: str


@attrs.frozen
class Report:
    """What a worker did, returned when it has stopped.

    Attributes:
        settled: Runs whose end was recorded.
        released: Claims given back at the deadline; empty after a clean stop.
        unsettled: Ids of runs whose result could not be recorded; empty after a clean stop.
    """

    settled: int
    released: tuple[Released, ...] = ()
    unsettled: tuple[uuid.UUID, ...] = ()
