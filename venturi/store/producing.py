"""What producers write: new jobs, and merges into pending ones. Every function works on any connection, in any
transaction.
"""

from __future__ import annotations

import datetime as dt
import json
import typing as t
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence

import attrs

from venturi.store import sql
from venturi.store.connections import Connection, array, run, texts
from venturi.values import Priority

__all__ = ["MICROSECOND", "Candidate", "Merged", "NewJob", "Producing", "is_large"]

MICROSECOND = dt.timedelta(microseconds=1)

FIRST_ROWS = 250
PIECE_ROWS = 2000
PIECE_BYTES = 32 * 1024 * 1024
"""The first statement of a batch takes so many rows, each next one twice as many, up to these bounds."""

MANY_KEYS = 500
"""A batch with more keys of one kind locks the kind as a whole: every lock takes room in the server's lock table."""

T = t.TypeVar("T")


def _utc(moment: dt.datetime) -> dt.datetime:
    return moment.astimezone(dt.UTC)


@attrs.define
class NewJob:
    """A job to insert.

    Attributes:
        payload: Its JSON text.
        carry: Its JSON text; None when never set.
        visible_at: When it is due; for batches only.
    """

    id: uuid.UUID
    kind: str
    payload: str
    priority: Priority
    dedup_key: str | None = None
    carry: str | None = None
    visible_at: dt.datetime = dt.datetime.min


@attrs.frozen
class Candidate:
    """A pending job that a new one may be merged into, locked for the transaction that read it."""

    live_tid: str
    body_tid: str
    id: uuid.UUID
    kind: str
    payload: str
    carry: str | None
    run_count: int
    failure_count: int
    priority: Priority = attrs.field(converter=Priority)
    visible_at: dt.datetime = attrs.field(converter=_utc)
    created_at: dt.datetime = attrs.field(converter=_utc)


@attrs.define
class Merged:
    """The new state of a candidate."""

    candidate: Candidate
    payload: str
    carry: str | None
    failure_count: int
    priority: Priority
    visible_at: dt.datetime


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

    def insert(
        self, connection: Connection, job: NewJob, trace: str | None, at: dt.datetime | None, delay: dt.timedelta
    ) -> None:
        """Insert one job without looking for others; body, live row and bell in one statement."""
        bell = self._sql.bell(job.kind)
        row = (job.id, job.kind, job.payload, int(job.priority), job.dedup_key, trace, at, delay, bell, str(bell))
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
        self,
        connection: Connection,
        wanted: Sequence[tuple[int, str, str]],
        most: int,
        passed: Sequence[uuid.UUID] = (),
    ) -> dict[int, list[Candidate]]:
        """The pending jobs of each (number, kind, key), the oldest first, by number; the jobs passed are left out.

        Args:
            wanted: A number may come with several kinds, which are aliases of one another.
            most: How many for each number.
        """
        numbers, kinds, keys = zip(*wanted, strict=True)
        # Unprepared: a plan kept from a nearly empty table would read all of it later, and a caller's session is not
        # ours to set.
        parameters = (list(numbers), list(kinds), list(keys), list(passed), most)
        found: dict[int, list[Candidate]] = {}
        for number, *row in run(connection, self._sql(sql.CANDIDATES), parameters, prepare=False).fetchall():
            found.setdefault(number, []).append(Candidate(*row))
        for candidates in found.values():
            candidates.sort(key=lambda candidate: (candidate.created_at, candidate.id))
            del candidates[most:]  # of each kind there are so many: one that comes later may not be the next
        return found

    def insert_many(
        self, connection: Connection, jobs: Iterable[NewJob], trace: str | None, created_at: dt.datetime
    ) -> None:
        """Insert a batch whose jobs have their ``visible_at`` set.

        They are taken piece by piece: in a pipeline the database is at one while the next is made.
        """
        for piece in _pieces(jobs, lambda job: len(job.payload)):
            run(connection, self._sql(sql.INSERT_MANY), (*_columns(piece), trace, created_at))

    def merge(self, connection: Connection, merged: Sequence[Merged], trace: str | None) -> None:
        """Store the new state of locked candidates.

        Raises:
            RuntimeError: One of them is not as it was when it was read.
        """
        rows = [
            f'["{m.candidate.live_tid}","{m.candidate.body_tid}",{m.payload},{int(m.priority)},'
            f'"{m.visible_at.isoformat()}",{_optional(m.carry)},{m.failure_count}]'
            for m in merged
        ]
        for piece in _pieces(rows, len):
            stored = run(connection, self._sql(sql.MERGE), (_json(piece), trace), prepare=False).rowcount
            # Only on the caller's own connection can anybody have come in between. In a pipeline, where the number is
            # not known yet, it is -1.
            if 0 <= stored < len(piece):
                raise RuntimeError("merge() has itself changed the job that it was asked about")

    def record(self, connection: Connection, entries: Sequence[MergeEntry]) -> None:
        """Append the journal entries of merges, in the order given."""
        rows = [
            f'["{e.id}",{e.run_no},{e.failure_count},{json.dumps(e.kind)},"{e.decision}",{e.evidence}]' for e in entries
        ]
        for piece in _pieces(rows, len):
            run(connection, self._sql(sql.MERGED), (_json(piece),))

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


def is_large(payloads: Sequence[str]) -> bool:
    """Whether a batch takes more than one statement."""
    return len(payloads) > FIRST_ROWS or sum(map(len, payloads)) > PIECE_BYTES


def _columns(jobs: Sequence[NewJob]) -> tuple[dt.datetime, str, str, str, str, str, str, str]:
    """The jobs as the arrays that INSERT_MANY reads; payloads and carries, JSON already, are put in as they are."""
    first = jobs[0].visible_at
    return (
        first,
        array((job.visible_at - first) // MICROSECOND for job in jobs),
        array(job.id.hex for job in jobs),
        texts([job.kind for job in jobs]),
        array(int(job.priority) for job in jobs),
        texts([job.dedup_key for job in jobs]),
        _json(job.payload for job in jobs),
        _json(_optional(job.carry) for job in jobs),
    )


def _optional(text: str | None) -> str:
    """JSON that tells absent from null: an empty array, or an array with the value."""
    return "[]" if text is None else f"[{text}]"


def _json(elements: Iterable[str]) -> str:
    """The JSON array of what is JSON already."""
    return f"[{','.join(elements)}]"


def _pieces(rows: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """The rows in parts, bounded in number and size; the first ones small, so that the database can begin early."""
    piece: list[T] = []
    taken, most = 0, FIRST_ROWS
    for row in rows:
        piece.append(row)
        taken += size(row)
        if len(piece) >= most or taken > PIECE_BYTES:
            yield piece
            piece, taken, most = [], 0, min(2 * most, PIECE_ROWS)
    if piece:
        yield piece
