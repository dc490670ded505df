"""One enqueue with dedup keys: find what is pending, let the tasks decide, and write what comes of it.

All of it happens in one transaction, in the caller's thread, under locks on the keys. A batch leaves exactly what its
tasks would leave one by one: a task may merge into a job that an earlier task of the same batch inserts. Only the
history that a merge may ask for is that from before the batch.
"""

from __future__ import annotations

import datetime as dt
import json
import typing as t
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import attrs

from venturi import checks, codec
from venturi.carry import read_carry, write_carry
from venturi.context import Pending
from venturi.errors import PayloadError
from venturi.ids import uuid7, uuid7s
from venturi.log import Log, log
from venturi.outcome import Combine, Independent, Keep, Replace
from venturi.store.connections import Connection, Session
from venturi.store.producing import MICROSECOND, Candidate, Merged, MergeEntry, NewJob, Producing, is_large
from venturi.store.sql import LATEST_INSTANT
from venturi.task import TaskType
from venturi.values import Action, Entry, Priority, Receipt

__all__ = ["Merging", "Request"]

logger: Log = log("venturi.queue")

DEEPER = 1000
"""Pending jobs of a key that are read at a time where the oldest one cannot be decoded."""

_DECISIONS: tuple[type[t.Any], ...] = (Keep, Replace, Combine, Independent)


@attrs.define
class Request:
    """One task to be enqueued, checked and encoded.

    Attributes:
        payload: The task as JSON text.
        key: Its dedup key.
        index: Its position in the batch; None: it is no batch.
    """

    task: t.Any
    type: TaskType
    payload: str
    priority: Priority
    key: str | None
    index: int | None = None

    @property
    def kind(self) -> str:
        """The kind of its task."""
        return self.type.kind

    def job(self, id: uuid.UUID, due: dt.datetime = dt.datetime.min) -> NewJob:
        """The job that it becomes unless it is merged."""
        return NewJob(id, self.kind, self.payload, self.priority, self.key, visible_at=due)


@attrs.define(kw_only=True)
class _Held:
    """A pending job as the batch has left it so far: one from the table, or one that the batch itself inserts."""

    id: uuid.UUID
    kind: str
    task: t.Any
    payload: str
    priority: Priority
    visible_at: dt.datetime
    created_at: dt.datetime
    carry: str | None = None
    run_count: int = 0
    failure_count: int = 0
    candidate: Candidate | None = None
    inserted: NewJob | None = None
    changed: bool = False


class Merging:
    """One call of enqueue or enqueue_many.

    Args:
        producing: The statements.
        connection: Where they run, inside a transaction.
        history: Reads the newest entries of a job.
        trace: The JSON text of the producer's trace context; None without one.
        at: When the tasks are due; None: ``delay`` from now.
    """

    def __init__(
        self,
        producing: Producing,
        connection: Connection,
        history: Callable[[uuid.UUID], list[Entry]],
        trace: str | None,
        at: dt.datetime | None,
        delay: dt.timedelta,
    ) -> None:
        self._producing = producing
        self._connection = connection
        self._history = history
        self._trace = trace
        self._at = at
        self._delay = delay
        self._held: dict[tuple[str, str], _Held] = {}
        self._inserts: list[NewJob] = []
        self._entries: list[MergeEntry] = []
        self._sooner: set[str] = set()
        self._now = dt.datetime.min
        # Of statements that need no answer and call nothing of the user's, where they do not travel so anyway.
        self._together: Callable[[], AbstractContextManager[object]] = nullcontext

    def store(self, requests: Sequence[Request]) -> list[Receipt]:
        """Write the requests; a receipt for each, in order."""
        self._now = self._producing.clock(self._connection)
        if isinstance(self._connection, Session) or not is_large([request.payload for request in requests]):
            return self._store(requests)
        # On a caller's connection, between two statements an interrupt may come, and the caller go on and commit. The
        # clock has begun a transaction, so that this makes a savepoint and never commits.
        self._together = self._connection.pipeline
        with self._connection.transaction():
            return self._store(requests)

    def _store(self, requests: Sequence[Request]) -> list[Receipt]:
        keyed = [request for request in requests if request.key is not None]
        if not keyed:
            return self._insert(requests)
        self._find(keyed)
        receipts = [self._place(request, due) for request, due in zip(requests, self._dues(len(requests)), strict=True)]
        self._write()
        return receipts

    def _insert(self, requests: Sequence[Request]) -> list[Receipt]:
        """Insert tasks none of which can be merged; jobs and receipts are made while the database is at others."""
        receipts: list[Receipt] = []

        def jobs() -> Iterator[NewJob]:
            for request, id_, due in zip(requests, uuid7s(len(requests)), self._dues(len(requests)), strict=True):
                job = request.job(uuid.UUID(int=id_), due)
                receipts.append(Receipt(job.id, "inserted"))
                yield job

        with self._together():
            self._producing.insert_many(self._connection, jobs(), self._trace, self._now)
            self._producing.ring(self._connection, {request.kind for request in requests})
        return receipts

    def _dues(self, count: int) -> Iterator[dt.datetime]:
        """When tasks are due: those of a batch a microsecond after each other, the last one at the time asked for.

        So the order in which they were given holds without an id in the index, and all of them are due at once.
        """
        asked = self._at or self._later(self._delay)
        due = min(max(asked, self._now), LATEST_INSTANT) - (count - 1) * MICROSECOND
        for _ in range(count):
            yield due
            due += MICROSECOND

    def _later(self, delay: dt.timedelta) -> dt.datetime:
        delay = max(delay, dt.timedelta(0))
        return LATEST_INSTANT if delay > LATEST_INSTANT - self._now else self._now + delay

    def _find(self, requests: Sequence[Request]) -> None:
        """Lock the keys, and take hold of the oldest decodable pending job of each."""
        wanted = {(r.kind, t.cast(str, r.key)): r.type for r in requests}
        if not wanted:
            return
        # Aliases are locked too: producers from before a renaming know the kind by them.
        self._producing.lock(
            self._connection, [(kind, key) for (_, key), type_ in wanted.items() for kind in type_.kinds]
        )
        missing = list(wanted.items())
        passed: list[uuid.UUID] = []
        most = 1
        while missing:
            asked = [(n, kind, key) for n, ((_, key), type_) in enumerate(missing) for kind in type_.kinds]
            found = self._producing.candidates(self._connection, asked, most, passed)
            undecodable: list[tuple[tuple[str, str], TaskType]] = []
            for n, candidates in found.items():
                slot, type_ = missing[n]
                held = next(filter(None, (_decoded(candidate, type_, most > 1) for candidate in candidates)), None)
                if held is None:
                    passed += [candidate.id for candidate in candidates]
                    undecodable.append((slot, type_))
                else:
                    self._held[slot] = held
            missing, most = undecodable, DEEPER

    def _place(self, request: Request, due: dt.datetime) -> Receipt:
        slot = None if request.key is None else (request.kind, request.key)
        held = None if slot is None else self._held.get(slot)
        decision = Independent() if held is None else self._decide(request, held)
        if held is None or isinstance(decision, Independent):
            job = request.job(uuid7(), due)
            self._inserts.append(job)
            self._sooner.add(request.kind)
            if slot is not None and held is None:
                self._held[slot] = _Held(
                    id=job.id,
                    kind=job.kind,
                    task=request.task,
                    payload=job.payload,
                    priority=job.priority,
                    visible_at=due,
                    created_at=self._now,
                    inserted=job,
                )
            return Receipt(job.id, "inserted")
        return Receipt(held.id, self._apply(request, held, decision, due))

    def _decide(self, request: Request, held: _Held) -> t.Any:
        merge = getattr(request.task, "merge", None)
        if not callable(merge):
            return Replace()
        pending = Pending[t.Any, t.Any](
            id=held.id,
            task=held.task,
            carry=read_carry(held.carry, request.type),
            run_count=held.run_count,
            failure_count=held.failure_count,
            priority=held.priority,
            asked_priority=request.priority,
            age=self._now - held.created_at,
            visible_at=held.visible_at,
            history=lambda: self._history(held.id),
        )
        decision = merge(pending)
        if not isinstance(decision, _DECISIONS):
            raise TypeError(
                f"{type(request.task).__qualname__}.merge() must return Keep, Replace, Combine or Independent, "
                f"not {type(decision).__name__}"
            )
        return decision

    def _apply(self, request: Request, held: _Held, decision: t.Any, due: dt.datetime) -> Action:
        before = (held.priority, held.visible_at)
        action: Action = "kept"
        made = t.cast(object, type(decision))
        if made is Replace:
            held.task, held.payload = request.task, request.payload
            held.carry, held.failure_count, held.priority = None, 0, request.priority
            action = "replaced"
        elif made is Combine:
            self._combine(request, held, decision)
            action = "combined"
        if action != "kept":
            held.visible_at = self._merged_due(decision.delay, held.visible_at, due)
            held.changed = True
            if held.visible_at < before[1] or held.priority < before[0]:
                # The job may be of a former kind, and wait for a worker that knows no other.
                self._sooner.update(request.type.kinds)
        self._note(request, held, type(decision).__name__, before)
        return action

    def _combine(self, request: Request, held: _Held, decision: Combine[t.Any]) -> None:
        type_ = request.type
        if type(decision.task) is not type_.cls:
            raise TypeError(
                f"Combine(task=...) must hold a {type_.cls.__qualname__}, not {type(decision.task).__name__}"
            )
        try:
            held.task, held.payload = decision.task, codec.encode(decision.task, type_.cls)
            if decision.carry is not attrs.NOTHING:
                held.carry = write_carry(decision.carry, type_)
        except PayloadError as error:
            raise PayloadError(error.problem, path=error.path, index=request.index) from error
        wanted = decision.priority
        held.priority = request.priority if wanted is None else checks.priority("priority", wanted)

    def _merged_due(self, delay: dt.timedelta | None, existing: dt.datetime, asked: dt.datetime) -> dt.datetime:
        if delay is None:
            return min(existing, asked)
        return self._later(checks.delay("delay", delay))

    def _note(self, request: Request, held: _Held, decision: str, before: tuple[Priority, dt.datetime]) -> None:
        evidence = {
            "priority": [int(before[0]), int(held.priority)],
            "visible_at": [before[1].isoformat(), held.visible_at.isoformat()],
        }
        self._entries.append(
            MergeEntry(held.id, held.run_count, held.failure_count, held.kind, decision, json.dumps(evidence))
        )

    def _write(self) -> None:
        changed = [held for held in self._held.values() if held.changed]
        for held in changed:
            if (job := held.inserted) is not None:
                job.payload, job.carry = held.payload, held.carry
                job.priority, job.visible_at = held.priority, held.visible_at
        stored = [
            Merged(h.candidate, h.payload, h.carry, h.failure_count, h.priority, h.visible_at)
            for h in changed
            if h.candidate is not None
        ]
        if stored:
            self._producing.merge(self._connection, stored, self._trace)
        with self._together():
            self._append()

    def _append(self) -> None:
        if self._inserts:
            self._producing.insert_many(self._connection, self._inserts, self._trace, self._now)
        if self._entries:
            self._producing.record(self._connection, self._entries)
            for entry in self._entries:
                logger.debug(
                    "job %s of kind %s: merged, %s", entry.id, entry.kind, entry.decision,
                    extra={"job": str(entry.id), "kind": entry.kind, "run": entry.run_no},
                )  # fmt: skip
        if self._sooner:
            self._producing.ring(self._connection, self._sooner)


def _decoded(candidate: Candidate, type_: TaskType, quiet: bool) -> _Held | None:
    """The candidate with its task; None when payload or carry cannot be decoded, which the log is told unless quiet."""
    try:
        task: t.Any = codec.decode(candidate.payload, t.cast("type[t.Any]", type_.cls))
        read_carry(candidate.carry, type_)
    except PayloadError as error:
        if not quiet:
            logger.warning(
                "job %s of kind %s cannot be merged into: %s", candidate.id, candidate.kind, error.path,
                extra={"job": str(candidate.id), "kind": candidate.kind},
            )  # fmt: skip
        return None
    return _Held(
        id=candidate.id,
        kind=candidate.kind,
        task=task,
        payload=candidate.payload,
        priority=candidate.priority,
        visible_at=candidate.visible_at,
        created_at=candidate.created_at,
        carry=candidate.carry,
        run_count=candidate.run_count,
        failure_count=candidate.failure_count,
        candidate=candidate,
    )
