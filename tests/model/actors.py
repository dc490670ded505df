"""Producers, workers and operators of a real queue whose clock the test sets."""

from __future__ import annotations

import collections.abc as cabc
import datetime as dt
import math
import typing as t
import uuid

import attrs
from fixtures.claims import registry
from psycopg import sql

import venturi
from model.oracle import BACKSTOP, BASE, CAP, LEASE, START, End, Entry, Request, View
from venturi.context import RunSignal
from venturi.registry import Handler, Registry
from venturi.store.claiming import Claim, Claiming, Ending, Expired, WorkerRow
from venturi.store.connections import Session
from venturi.store.sql import Sql
from venturi.telemetry import Telemetry
from venturi.worker.flight import Flight, Run
from venturi.worker.lanes import Lanes
from venturi.worker.maintainer import Maintainer
from venturi.worker.marks import Marks
from venturi.worker.outages import Outages
from venturi.worker.rotation import Rotation
from venturi.worker.runner import Runner
from venturi.worker.settings import Settings

__all__ = ["CAPS", "KINDS", "Done", "Member", "Queue", "Recoverer", "task"]

CLOCK = "current_setting('venturi.clock')::timestamptz"
CAPS = {"capped": 2}
KINDS = ("capped", "plain")
CURVE = venturi.Backoff(BASE, CAP)
SETTINGS = Settings.of({"jitter": 0.0, "backstop": BACKSTOP, "backoff": CURVE})

Act: t.TypeAlias = cabc.Callable[[venturi.Context[t.Any, t.Any]], t.Any]


class _Policy:
    """What both tasks decide at their enqueue: as their fields say."""

    number: int
    key: str | None
    decision: str
    wait: int | None

    def dedup_key(self) -> str | None:
        return self.key

    def merge(self, existing: venturi.Pending[t.Any, t.Any]) -> venturi.Merge[t.Any]:
        delay = None if self.wait is None else dt.timedelta(seconds=self.wait)
        match self.decision:
            case "keep":
                return venturi.Keep()
            case "combine":
                both = type(self)(existing.task.number + self.number, self.key, self.decision, self.wait)  # type: ignore[call-arg]
                return venturi.Combine(both, delay=delay)
            case "independent":
                return venturi.Independent()
            case _:
                return venturi.Replace(delay)


@venturi.task("capped", carry=int)
@attrs.frozen
class Capped(_Policy):
    number: int
    key: str | None
    decision: str
    wait: int | None


@venturi.task("plain", carry=int, backoff=CURVE)
@attrs.frozen
class Plain(_Policy):
    number: int
    key: str | None
    decision: str
    wait: int | None


def task(request: Request) -> object:
    """The task that the request speaks of."""
    cls = Capped if request.kind == "capped" else Plain
    return cls(request.number, request.key, request.decision, request.wait)


def _capped(task: Capped, ctx: venturi.Context[int, Act]) -> venturi.Outcome:
    return t.cast(venturi.Outcome, ctx.state(ctx))


def _plain(task: Plain, ctx: venturi.Context[int, Act]) -> venturi.Outcome:
    return t.cast(venturi.Outcome, ctx.state(ctx))


def handlers(kinds: cabc.Collection[str]) -> Registry:
    """The handlers of a worker that serves these kinds."""
    made: dict[str, Handler[t.Any]] = {
        "capped": Handler(_capped, task=Capped, cap=CAPS["capped"]), "plain": Handler(_plain, task=Plain)
    }  # fmt: skip
    return registry(*(made[kind] for kind in kinds))


class Queue(venturi.Queue[None]):
    """A queue on one session, with the session's clock.

    Args:
        session: Where everything happens.
    """

    def __init__(self, schema: str, dsn: str, session: Session) -> None:
        super().__init__(schema, dsn=dsn)
        self.session = session
        self.statements = Sql(schema, now=CLOCK)

    def set_clock(self, now: dt.datetime) -> None:
        """From now on it is that instant."""
        self.session.execute("SELECT set_config('venturi.clock', %s, false)", [now.isoformat()])

    def empty(self) -> None:
        """Forget everything."""
        self.rows("TRUNCATE {0}.live, {0}.jobs, {0}.journal, {0}.dead, {0}.cancels, {0}.workers")

    def rows(self, statement: t.LiteralString) -> list[tuple[t.Any, ...]]:
        """The rows of a statement in which ``{0}`` is the schema."""
        cursor = self.session.execute(sql.SQL(statement).format(sql.Identifier(self.schema)))
        return cursor.fetchall() if cursor.description else []

    def views(self) -> dict[uuid.UUID, View]:
        """Every job as it stands."""
        return {
            j.id: View(
                j.kind, j.status, int(j.priority), j.payload["number"], j.dedup_key, j.carry, j.run_count,
                j.failure_count, j.created_at, j.visible_at, j.owner, j.lease_until, j.finished_at,
            )
            for j in self.jobs(limit=1000, conn=self.session)
        }  # fmt: skip

    def entries(self) -> dict[uuid.UUID, list[Entry]]:
        """Every entry of the journal, by job, in order."""
        rows = self.rows(
            "SELECT job_id, outcome, run_no, failure_count, recorded_at, worker FROM {0}.all_entries ORDER BY id"
        )
        found: dict[uuid.UUID, list[Entry]] = {}
        for job, *rest in rows:
            found.setdefault(job, []).append(Entry(*rest))
        return found


@attrs.define(eq=False)
class Done:
    """A run that has ended in its slot, and how that is to be recorded."""

    ending: Ending
    end: End


class Member:
    """One worker: all of it but its threads.

    Attributes:
        flight: Claims whose handler has not run yet.
        done: Runs that wait for being settled.
        turned: The position of its rotation, counted from the beginning.
    """

    def __init__(self, queue: Queue, kinds: cabc.Sequence[str], slots: int, start: int) -> None:
        self.id = uuid.uuid4()
        self.kinds = tuple(kinds)
        self.slots = slots
        self.turned = start
        self.swept = -math.inf
        self.flight: list[Run] = []
        self.done: list[Done] = []
        self.act: Act = lambda ctx: None
        self._registry = handlers(kinds)
        self.lanes = Lanes(self._registry, slots, Rotation(4, start), Marks())
        self.claiming = Claiming(queue.statements, WorkerRow(self.id, "paper", 1, slots, self.kinds, LEASE))
        self._runner = Runner(self.id, SETTINGS, self._act, Telemetry("model"), lambda id_: [])

    def _act(self, ctx: venturi.Context[t.Any, t.Any]) -> t.Any:
        return self.act(ctx)

    def room(self, kind: str) -> int:
        """How many more runs of the kind there may be once all that is done is settled."""
        free = self.slots - len(self.flight)
        flying = sum(run.claim.kind == kind for run in self.flight)
        return min(free, CAPS.get(kind, self.slots) - flying)

    def take(self, claims: cabc.Sequence[Claim]) -> None:
        """Claims come in."""
        self.turned += len(claims)
        self.lanes.claimed(claims)
        self.flight += [Run(claim, self._registry.find(claim.kind), RunSignal(math.inf)) for claim in claims]

    def run(self, run: Run, act: Act) -> Ending:
        """Run one claim to its end."""
        self.flight.remove(run)
        self.act = act
        ending = self._runner(run)
        assert ending is not None
        return ending

    def seconds(self, now: dt.datetime) -> float:
        """The instant on its monotonic clock."""
        return (now - START).total_seconds()


class Recoverer(Maintainer):
    """A maintainer that recovers when it is told to."""

    def __init__(self, queue: Queue) -> None:
        outages = Outages("model")
        self.claiming = Claiming(queue.statements, WorkerRow(uuid.uuid4(), "paper", 2, 1, (), LEASE))
        super().__init__(
            lambda: queue.session, self.claiming, Flight(), handlers(["plain"]), SETTINGS, queue.telemetry, outages,
            failed=lambda error: None,
        )  # fmt: skip
        self._on = queue.session

    def recover(self) -> None:
        """Recover everything that is lost."""
        self._recover(self._on)

    def decide(self) -> list[tuple[Expired, Ending]]:
        """What it would do now."""
        return [(claim, self._ending(claim)) for claim in self.claiming.expired(self._on, everywhere=True)]
