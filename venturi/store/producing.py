"""What producers write: new jobs, and merges into pending ones. Every function works on any connection, in any
transaction.
"""

from __future__ import annotations

import datetime as dt
import json
import uuid
from collections.abc import Iterable, Iterator, Sequence

import attrs

from venturi.ids import uuid7s
from venturi.store import sql
from venturi.store.connections import Connection, run
from venturi.store.copying import Plain, copy
from venturi.values import Priority, Receipt

__all__ = ["Candidate", "Merged", "NewJob", "Producing"]

COPY_JOBS = 50_000
"""Jobs of one COPY, which takes a second: far from any timeout."""

CHUNK_JOBS = 5000
CHUNK_BYTES = 32 * 1024 * 1024

MANY_KEYS = 500
"""A batch with more keys of one kind locks the kind as a whole: every lock takes room in the server's lock table."""


@attrs.define
class NewJob:
    """A job to insert.

    Attributes:
        payload: Its JSON text.
        trace: The JSON text of the producer's trace context; None without one.
        carry: Its JSON text; None when never set.
        visible_at: When it is due; set for batches only.
    """

    id: uuid.UUID
    kind: str
    payload: str
    priority: Priority
    dedup_key: str | None = None
    trace: str | None = None
    carry: str | None = None
    visible_at: dt.datetime | None = None


@attrs.frozen
class Candidate:
    """A pending job that a new one may be merged into, locked for the transaction that read it."""

    live_tid: str
    body_tid: str
    id: uuid.UUID
    payload: str
    carry: str | None
    run_count: int
    failure_count: int
    priority: Priority
    visible_at: dt.datetime
    created_at: dt.datetime


@attrs.define
class Merged:
    """The new state of a candidate."""

    candidate: Candidate
    payload: str
    carry: str | None
    failure_count: int
    priority: Priority
    visible_at: dt.datetime
    trace: str | None


@attrs.frozen
class MergeEntry:
    """One merge, for the journal."""

    id: uuid.UUID
    run_no: int
    failure_count: int
    kind: str
    decision: str
    evidence: str


class Producing:
    """The producers' statements of one queue.

    Args:
        statements: The rendered statements; they say whether the doorbell is rung.
    """

    def __init__(self, statements: sql.Sql) -> None:
        self._sql = statements
        self._schema_key = statements.channel

    def insert(self, connection: Connection, job: NewJob, at: dt.datetime | None, delay: dt.timedelta) -> None:
        """Insert one job without looking for others; body, live row and bell in one statement."""
        bell = self._sql.bell(job.kind)
        row = (job.id, job.kind, job.payload, int(job.priority), job.dedup_key, job.trace, at, delay, bell, str(bell))
        run(connection, self._sql(sql.INSERT), row)

    def clock(self, connection: Connection) -> dt.datetime:
        """The clock that a batch goes by."""
        return _utc(run(connection, self._sql(sql.CLOCK)).fetchall()[0][0])

    def ring(self, connection: Connection, kinds: Iterable[str]) -> None:
        """Wake the parked workers of these kinds when the transaction commits."""
        run(connection, self._sql(sql.RUNG), self._sql.rung(kinds))

    def lock(self, connection: Connection, keys: Sequence[tuple[str, str]]) -> None:
        """Lock (kind, key) pairs until the end of the transaction: the kinds shared, the keys exclusively."""
        locks = sorted(self._locks(keys), key=lambda lock: (not lock[0], lock[1]))
        of_kind, ids, alone = ([lock[n] for lock in locks] for n in range(3))
        run(connection, self._sql(sql.LOCK_KEYS), (of_kind.count(False), ids, of_kind, alone))

    def candidates(
        self, connection: Connection, wanted: Sequence[tuple[int, str, str]], passed: Sequence[uuid.UUID] = ()
    ) -> dict[int, Candidate]:
        """The oldest pending job for each (number, kind, key), by number; the jobs passed are left out.

        A number may come with several kinds, which are aliases of one another.
        """
        numbers, kinds, keys = zip(*wanted, strict=True)
        # Unprepared: a plan kept from a nearly empty table would read all of it later, and a caller's session is not
        # ours to set.
        rows = run(
            connection, self._sql(sql.CANDIDATES), (list(numbers), list(kinds), list(keys), list(passed)), prepare=False
        ).fetchall()
        oldest: dict[int, tuple[tuple[dt.datetime, uuid.UUID], Candidate]] = {}
        for number, live_tid, body_tid, id_, payload, carry, runs, failures, priority, visible_at, created_at in rows:
            counts = (runs, failures, Priority(priority))
            found = Candidate(live_tid, body_tid, id_, payload, carry, *counts, _utc(visible_at), _utc(created_at))
            age = (created_at, id_)
            if number not in oldest or age < oldest[number][0]:
                oldest[number] = (age, found)
        return {number: found for number, (_, found) in oldest.items()}

    def insert_many(self, connection: Connection, jobs: Iterable[NewJob], created_at: dt.datetime) -> None:
        """Insert a batch whose jobs have their ``visible_at`` set."""
        for chunk in _chunks([_row(job, created_at.isoformat()) for job in jobs]):
            run(connection, self._sql(sql.INSERT_MANY), (chunk,))

    def copy(
        self, connection: Connection, jobs: Sequence[Plain], created_at: dt.datetime, due: dt.datetime
    ) -> list[Receipt]:
        """Insert many jobs that are due a microsecond after each other, the first of them at ``due``."""
        receipts: list[Receipt] = []
        for piece in _pieces(jobs):
            soon = due + dt.timedelta(microseconds=len(receipts))
            receipts += copy(connection, self._sql, piece, uuid7s(len(piece)), created_at, soon)
        return receipts

    def merge(self, connection: Connection, merged: Sequence[Merged]) -> None:
        """Store the new state of locked candidates."""
        rows = [
            f'["{m.candidate.live_tid}","{m.candidate.body_tid}",{m.payload},{int(m.priority)},'
            f'"{m.visible_at.isoformat()}",{_optional(m.carry)},{m.failure_count},{m.trace or "null"}]'
            for m in merged
        ]
        for chunk in _chunks(rows):
            run(connection, self._sql(sql.MERGE), (chunk,), prepare=False)

    def record(self, connection: Connection, entries: Sequence[MergeEntry]) -> None:
        """Append the journal entries of merges, in the order given."""
        rows = [
            f'["{e.id}",{e.run_no},{e.failure_count},{json.dumps(e.kind)},"{e.decision}",{e.evidence}]' for e in entries
        ]
        for chunk in _chunks(rows):
            run(connection, self._sql(sql.MERGED), (chunk,))

    def _locks(self, keys: Sequence[tuple[str, str]]) -> Iterator[tuple[bool, int, bool]]:
        """(whether of a kind, advisory key, whether exclusive) of the locks that the keys need."""
        by_kind: dict[str, set[str]] = {}
        for kind, key in keys:
            by_kind.setdefault(kind, set()).add(key)
        for kind, of_kind in by_kind.items():
            alone = len(of_kind) > MANY_KEYS
            yield True, sql.key64(self._schema_key, kind), alone
            if not alone:
                for key in of_kind:
                    yield False, sql.key64(self._schema_key, kind, key), True


def _row(job: NewJob, created_at: str) -> str:
    """The job as an element of the JSON array that INSERT_MANY reads; its payload, JSON already, is put in as it is."""
    key = "null" if job.dedup_key is None else json.dumps(job.dedup_key)
    return (
        f'["{job.id}",{json.dumps(job.kind)},{job.payload},{int(job.priority)},{key},{job.trace or "null"},'
        f'"{job.visible_at}","{created_at}",{_optional(job.carry)}]'
    )


def _optional(text: str | None) -> str:
    """JSON that tells absent from null: an empty array, or an array with the value."""
    return "[]" if text is None else f"[{text}]"


def _chunks(rows: Sequence[str]) -> Iterator[str]:
    """JSON arrays of the rows, bounded in number and size."""
    chunk: list[str] = []
    size = 0
    for row in rows:
        if chunk and (len(chunk) >= CHUNK_JOBS or size + len(row) > CHUNK_BYTES):
            yield f"[{','.join(chunk)}]"
            chunk, size = [], 0
        chunk.append(row)
        size += len(row)
    if chunk:
        yield f"[{','.join(chunk)}]"


def _pieces(jobs: Sequence[Plain]) -> Iterator[Sequence[Plain]]:
    """The jobs in parts, bounded in number and size."""
    first = size = 0
    for number, job in enumerate(jobs):
        if number - first == COPY_JOBS or size > CHUNK_BYTES:
            yield jobs[first:number]
            first, size = number, 0
        size += len(job.payload)
    yield jobs[first:]


def _utc(moment: dt.datetime) -> dt.datetime:
    return moment.astimezone(dt.UTC)
