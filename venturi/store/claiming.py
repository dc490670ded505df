"""What a worker does to claims: take them, renew them, end them, and take back those of workers that are gone.

A claim is a row of ``live`` with an owner, the random id of one worker, and a ``run_count``, which that claim raised.
Both together are its epoch: whatever speaks of a claim names id, owner and run_count, and changes nothing when the row
says otherwise. So a late result, a late renewal, or a second recovery is refused by itself, however it was delayed.
"""

from __future__ import annotations

import datetime as dt
import json
import typing as t
import uuid
from collections.abc import Iterable, Sequence

import attrs

from venturi.store import claiming_sql, sql
from venturi.store.connections import Connection, Rows, array, run, texts, together
from venturi.values import JournalOutcome

__all__ = ["Ask", "Claim", "Claiming", "Ending", "Expired", "Turn", "Unsettled", "WorkerRow"]

_NUMBER: dict[str, int] = {outcome: number for number, outcome in enumerate(sql.OUTCOMES)}

RECOVERY_BATCH = 100


@attrs.define
class Claim:
    """One claimed job. Payload and carry are JSON text, decoded in the slot.

    Attributes:
        key: The job's id as text, which is all that most claims are asked for.
        eligible: When it became due, in seconds since 1970.
        waited: Seconds from then to the claim, on the database's clock.
    """

    key: str
    kind: str
    priority: int
    run_count: int
    failure_count: int
    carry: str | None
    eligible: float
    waited: float
    payload: str | None
    trace: str | None

    @property
    def id(self) -> uuid.UUID:
        """The job's id."""
        return uuid.UUID(self.key)


@attrs.define
class Ask:
    """What to claim: one element per lane in the lists, and the positions of the rotation per tier.

    Attributes:
        tasks: A number per lane that is the same for the kind and its aliases in all tiers, since they share a cap.
        rooms: How many more runs the lane's task may have.
        depths: How many jobs to look at in the lane: as many as it has room for, or where no cap limits fewer, which
            show how many more are needed.
        marks: Seconds since 1970 below which the lane is not looked at.
        count: Most jobs to claim.
    """

    kinds: Sequence[str]
    tiers: Sequence[int]
    tasks: Sequence[int]
    rooms: Sequence[int]
    depths: Sequence[int]
    marks: Sequence[float]
    positions: tuple[Sequence[int], Sequence[int], Sequence[int]]
    count: int


@attrs.define
class Ending:
    """How one claim ends.

    Attributes:
        key: The job's id as text.
        owner: The worker that holds the claim; another than the caller's in a recovery.
        delay: Microseconds until the job is due again, for what goes back to pending.
        duration: Microseconds that the handler ran.
        evidence: JSON text; None for none.
        carry: JSON text to store; None keeps the stored one.
    """

    key: str
    kind: str
    run_count: int
    owner: uuid.UUID
    outcome: JournalOutcome
    delay: int = 0
    duration: int = 0
    note: str | None = None
    traceback: str | None = None
    evidence: str | None = None
    carry: str | None = None


@attrs.frozen
class Unsettled:
    """A claim whose end was not recorded.

    Attributes:
        key: The job's id as text.
        ours: The claim still stands and was only locked: to be asked again.
        done: An earlier try, whose answer was lost, has recorded this very end.
    """

    key: str
    run_count: int
    ours: bool
    done: bool


@attrs.frozen
class Turn:
    """The answer to one turn.

    Attributes:
        seen: How many jobs were there for the taking; more than were claimed when others hold some of them.
    """

    unsettled: Sequence[Unsettled]
    claims: Sequence[Claim]
    seen: int


@attrs.frozen
class Expired:
    """A claim whose lease is over.

    Attributes:
        key: The job's id as text.
        worker: Its owner in words, as ``host:pid``; None when nothing is known of it.
        cancel: Whether somebody asked to cancel it.
    """

    key: str
    kind: str
    run_count: int
    owner: uuid.UUID
    failure_count: int
    worker: str | None
    cancel: bool


@attrs.frozen
class WorkerRow:
    """What a worker says of itself."""

    id: uuid.UUID
    host: str
    pid: int
    slots: int
    kinds: tuple[str, ...]
    lease: dt.timedelta


class Claiming:
    """The worker's statements of one queue.

    Attributes:
        owner: The id that this worker's claims carry.
    """

    def __init__(self, statements: sql.Sql, worker: WorkerRow) -> None:
        self.owner: uuid.UUID = worker.id
        self._sql = statements
        self._worker = worker

    def turn(self, session: Connection, endings: Sequence[Ending], ask: Ask | None) -> Turn:
        """Settle and claim, in one round trip and one commit.

        The settle comes first, so that a turn that fails as a whole has claimed nothing.
        """
        again = _again(endings)
        claimed: Rows | None = None
        with together(session):
            settled = self._send(session, endings, expired=False) if endings else None
            if ask is not None:
                claimed = run(session, self._sql(_statement(ask)), self._claim(ask), prepare=True)
            if again:
                run(session, self._sql(sql.RUNG), self._sql.rung(again))
        # Read after the pipeline: an answer that is read inside it takes a round trip of its own, before the commit's.
        unsettled = [Unsettled(*row) for row in settled.fetchall()] if settled else []
        rows = claimed.fetchall() if claimed else []
        claims = [Claim(*row[1:]) for row in rows if row[1] is not None]
        claims.sort(key=lambda claim: (claim.priority, claim.eligible))
        return Turn(unsettled, claims, rows[0][0] if rows else 0)

    def next_due(self, session: Connection, kinds: Sequence[str], tiers: Sequence[int]) -> float | None:
        """Seconds until the first unclaimed job of the lanes is due, below 0 when one is ready; None: there is none."""
        seconds: float | None = self._rows(session, claiming_sql.NEXT_DUE, (list(kinds), list(tiers)), True)[0][0]
        return seconds

    def settle(self, session: Connection, endings: Sequence[Ending], *, expired: bool = False) -> list[Unsettled]:
        """Record how claims end, in a transaction of its own.

        Args:
            expired: Only where the lease is over by the database's clock: a recovery.
        """
        again = _again(endings)
        with together(session):
            settled = self._send(session, endings, expired=expired)
            if again:
                run(session, self._sql(sql.RUNG), self._sql.rung(again))
        return [Unsettled(*row) for row in settled.fetchall()]

    def renew(
        self, session: Connection, claims: Sequence[tuple[str, int]], *, owner: uuid.UUID | None = None
    ) -> list[tuple[str, bool, bool]]:
        """Renew the leases of (key, run_count) pairs; for each the key, whether it was renewed, whether it is ours.

        Args:
            owner: Whose claims they are. Default: None, this worker's.
        """
        owner = owner or self._worker.id
        ids, runs = array(key for key, _ in claims), array(number for _, number in claims)
        parameters = (ids, runs, owner, self._worker.lease, owner)
        return self._rows(session, claiming_sql.RENEW, parameters, True)

    def expired(self, session: Connection, *, everywhere: bool = False) -> list[Expired]:
        """Up to 100 claims whose lease is over, the longest over first.

        Args:
            everywhere: Look at every live row, instead of where claims are known to stand.
        """
        depth = None if everywhere else self._depth(session)
        rows = self._rows(session, claiming_sql.EXPIRED, (depth, RECOVERY_BATCH))
        return [
            Expired(key, kind, runs, owner, failures, f"{host}:{pid}" if host is not None else None, cancel)
            for key, kind, runs, owner, failures, host, pid, cancel in rows
        ]

    def strays(
        self,
        session: Connection,
        kinds: Sequence[str],
        tiers: Sequence[int],
        known: Sequence[tuple[str, int]],
    ) -> list[Ending]:
        """The endings that release claims of this worker that are not known to it, as (key, run_count) pairs."""
        ids, runs = array(key for key, _ in known), array(number for _, number in known)
        parameters = (list(kinds), list(tiers), self._depth(session), self.owner, ids, runs)
        rows = self._rows(session, claiming_sql.STRAYS, parameters)
        note = "the answer to the claim was lost"
        return [Ending(key, kind, number, self.owner, "released", note=note) for key, kind, number in rows]

    def _depth(self, session: Connection) -> int:
        """How far from the head of a lane its claims stand: all slots there are, and some for what was passed over."""
        return int(self._rows(session, claiming_sql.SLOTS)[0][0]) + 1000

    def heartbeat(self, session: Connection) -> None:
        """Say that this worker lives, and remove the rows of workers silent for ten leases."""
        w = self._worker
        with together(session):
            row = (w.id, w.host, w.pid, w.slots, list(w.kinds), w.lease)
            run(session, self._sql(claiming_sql.HEARTBEAT), row, prepare=True)
            run(session, self._sql(claiming_sql.PRUNE_WORKERS), (), prepare=True)

    def leave(self, session: Connection) -> None:
        """Remove this worker's row."""
        with together(session):
            run(session, self._sql(claiming_sql.LEFT), (self._worker.id,))

    def cancels(self, session: Connection, keys: Sequence[str]) -> list[tuple[str, int]]:
        """Cancel jobs that went back to pending since the request; the (key, run_count) requests for those named."""
        with together(session):
            run(session, self._sql(claiming_sql.SWEEP_CANCELS), (), prepare=True)
            told = run(session, self._sql(claiming_sql.TOLD), (array(keys),), prepare=True)
        return told.fetchall()

    def _rows(
        self, session: Connection, statement: str, parameters: tuple[object, ...] = (), prepare: bool | None = None
    ) -> list[tuple[t.Any, ...]]:
        with together(session):
            answer = run(session, self._sql(statement), parameters, prepare)
        return answer.fetchall()

    def _claim(self, ask: Ask) -> tuple[object, ...]:
        lanes = (texts(ask.kinds), *map(array, (ask.tiers, ask.tasks, ask.rooms, ask.depths, ask.marks)))
        return (*lanes, *map(array, ask.positions), ask.count, self._worker.id, self._worker.lease)

    def _send(self, session: Connection, endings: Sequence[Ending], *, expired: bool) -> Rows:
        owners = {owner: str(owner) for owner in {ending.owner for ending in endings}}
        details = (_details(number, ending) for number, ending in enumerate(endings, 1))
        parameters = (
            array(ending.key for ending in endings),
            array(ending.run_count for ending in endings),
            array(owners[ending.owner] for ending in endings),
            array(_NUMBER[ending.outcome] for ending in endings),
            array(ending.delay for ending in endings),
            array(ending.duration for ending in endings),
            f"[{','.join(filter(None, details))}]",
            expired,
            expired,
        )
        return run(session, self._sql(claiming_sql.SETTLE), parameters, prepare=True)


def _again(endings: Iterable[Ending]) -> set[str]:
    """The kinds of jobs that go back to pending."""
    return {ending.kind for ending in endings if ending.outcome not in ("completed", "dead", "cancelled")}


def _statement(ask: Ask) -> str:
    if min(ask.rooms) < ask.count:
        return claiming_sql.CLAIM_CAPPED
    return claiming_sql.CLAIM_MANY if min(ask.depths) < ask.count else claiming_sql.CLAIM


def _details(number: int, ending: Ending) -> str:
    """The rarer fields as one JSON object; an empty text when there are none."""
    fields = [
        f'"{name}":{json.dumps(text)}'
        for name, text in (("note", ending.note), ("traceback", ending.traceback))
        if text
    ]
    if ending.evidence is not None:
        fields.append(f'"evidence":{ending.evidence}')
    if ending.carry is not None:
        # In an array, since a carry of null is not the same as none.
        fields.append(f'"carry":[{ending.carry}]')
    return f'{{"n":{number},{",".join(fields)}}}' if fields else ""
