"""The loop that claims and settles, on the thread that called ``work()``.

Each turn takes every run that has ended, settles all of them, and claims into the slots that are free, in one round
trip and one commit. A worker with little to do settles at once; a busy one batches by itself, because runs end while
it waits for the answer. There is no timer and no knob. When it looks for jobs, `venturi.worker.looks` says.
"""

from __future__ import annotations

import collections
import logging
import math
import random
import time
import typing as t
import uuid
from collections.abc import Callable, Sequence

import attrs
import psycopg

from venturi.context import RunSignal
from venturi.log import Log, log
from venturi.registry import Registry
from venturi.store.claiming import Claim, Claiming, Ending, Unsettled
from venturi.store.connections import Session
from venturi.telemetry import Telemetry
from venturi.worker.flight import Flight, Inbox, Run
from venturi.worker.lanes import Lanes
from venturi.worker.listener import Listener
from venturi.worker.looks import Looks
from venturi.worker.marks import Marks
from venturi.worker.outages import Outages, Retry
from venturi.worker.settings import Settings
from venturi.worker.slots import Slots
from venturi.worker.threads import Part

__all__ = ["Coordinator"]

logger: Log = log("venturi.worker")

_LEVELS = {"dead": logging.WARNING, "retried": logging.INFO}


class Coordinator:
    """Claims and settles for one worker.

    Args:
        connect: Opens its session.
        listener: None where nothing can be listened to: the worker polls.
        stopping: Whether the worker is to stop, in which case all runs in flight have been told.
    """

    def __init__(
        self,
        connect: Callable[[], Session],
        claiming: Claiming,
        registry: Registry,
        lanes: Lanes,
        marks: Marks,
        slots: Slots,
        flight: Flight,
        inbox: Inbox,
        listener: Listener | None,
        settings: Settings,
        telemetry: Telemetry,
        outages: Outages,
        *,
        stopping: Callable[[], bool],
    ) -> None:
        self.settled: int = 0
        self._part = Part("coordinator", connect, outages, Retry(0.1, 5.0))
        self._claiming = claiming
        self._registry = registry
        self._lanes = lanes
        self._slots = slots
        self._flight = flight
        self._inbox = inbox
        self._looks = Looks(listener, marks, self._next_due, settings.poll)
        self._settings = settings
        self._telemetry = telemetry
        self._stopping = stopping
        self._claims = True
        self._ended: list[Run] = []
        # Ended runs whose rows were locked, and when to ask for them again. They still hold their slots.
        self._locked: list[Run] = []
        self._locked_until = 0.0
        # The monotonic instant before which the database is left alone.
        self._trouble_until = 0.0
        self._claim_lost = False

    # --- The loop

    def wait(self, longest: float) -> None:
        """Wait for something to do, at most ``longest`` seconds."""
        ended, called = self._inbox.take(min(longest, self._patience()))
        self._ended.extend(self._recordable(ended))
        if called:
            self._looks.called()

    def act(self) -> None:
        """Do what there is to do; after a stop that is only to settle."""
        if self._claims and self._stopping():
            self._claims = False
            self._looks.leave()
        now = time.monotonic()
        if now < self._trouble_until:
            return
        if self._locked and now >= self._locked_until:
            self._unlock()
        if self._ended or (self._claims and now >= self._looks.due and self._lanes.room()):
            self._trouble_until = now + wait if (wait := self._part.attempt(self._turn)) else 0.0

    def busy(self) -> bool:
        """Whether there are runs in flight, or ends of runs to be recorded."""
        return len(self._flight) > 0

    def finish(self, grace: float) -> list[Run]:
        """Settle what has ended by now, and give the claims of all other handlers back, in one statement.

        Args:
            grace: Seconds in which to try again where a row is locked or the database cannot be reached.

        Returns:
            The runs given back.
        """
        self._claims = False
        self._ended.extend(self._recordable(self._inbox.take(0)[0]))
        self._unlock()
        settling = set(self._ended)
        stragglers = [run for run in self._flight.all() if run not in settling]
        released: list[Run] = []

        def last_turn() -> None:
            self._unlock()
            if self._ended:
                self._turn()
            if stragglers:
                stragglers[:] = self._give_back(stragglers, released)

        deadline = time.monotonic() + grace
        if self._claim_lost:
            self._part.attempt(lambda: self._release_strays(self._part.session()))
        while (self._ended or self._locked or stragglers) and time.monotonic() < deadline:
            wait = self._part.attempt(last_turn)
            if self._ended or self._locked or stragglers:
                time.sleep(min(max(wait, 0.02), 0.25))  # not the whole wait of an outage: there is no later
        return released

    def _give_back(self, stragglers: Sequence[Run], released: list[Run]) -> list[Run]:
        """Release claims in one statement; the runs whose rows were locked, to be tried again."""
        endings = [
            Ending(
                run.claim.key, run.claim.kind, run.claim.run_count, self._claiming.owner, "released",
                note="the worker stopped while the handler ran",
            )
            for run in stragglers
        ]  # fmt: skip
        answers = {answer.key: answer for answer in self._claiming.settle(self._part.session(), endings)}
        locked = [run for run in stragglers if run.claim.key in answers and answers[run.claim.key].ours]
        for run in stragglers:
            if run in locked:
                continue
            # A run whose claim was lost stays in flight: its handler still runs, and is not to be waited for.
            if run.claim.key not in answers or answers[run.claim.key].done:
                self._flight.remove([run])
                released.append(run)
                self._telemetry.count("venturi.released", venturi__kind=run.claim.kind)
        return locked

    def occupied(self) -> bool:
        """Whether there are handlers that hold a slot, whoever has the claim."""
        return self._lanes.running > 0

    def unsettled(self) -> list[uuid.UUID]:
        """Runs whose end could not be recorded, nor their claim given back."""
        return [run.claim.id for run in self._flight.all()]

    def refused(self, run: Run, why: str) -> None:
        """Note that the result of a run is not recorded."""
        self._telemetry.count("venturi.lost_claims", venturi__kind=run.claim.kind)
        logger.warning(
            "job %s of kind %s: the result of run %d is not recorded, its claim was %s",
            run.claim.key, run.claim.kind, run.claim.run_count, why, extra=run.tags(self._claiming.owner),
        )  # fmt: skip

    def close(self) -> None:
        """Close the session."""
        self._part.disconnect()

    def _patience(self) -> float:
        """Seconds until there is something to do even if nothing happens."""
        now = time.monotonic()
        moments = [math.inf]
        if self._ended:
            moments.append(now)
        if self._locked:
            moments.append(self._locked_until)
        if self._claims and self._lanes.room():
            moments.append(self._looks.due)
        return min(max(min(moments), self._trouble_until) - now, 30.0)

    def _recordable(self, ended: Sequence[Run]) -> list[Run]:
        """The runs whose end is to be recorded; what was released meanwhile, or gave way, is let go."""
        kept: list[Run] = []
        for run in ended:
            held = self._flight.holds(run)
            if held and run.ending is not None:
                kept.append(run)
                continue
            self._let_go([run])
            # What is not held was given back by the stop or, before that, overtaken by a later claim of the same job.
            self.refused(run, "lost" if held or self._claims else "released")
        return kept

    # --- A turn

    def _turn(self) -> None:
        now = time.monotonic()
        runs = self._ended
        endings = [t.cast(Ending, run.ending) for run in runs]
        ask = self._lanes.ask(now, [run.claim.kind for run in runs]) if self._claims else None
        session = self._part.session()
        if self._claim_lost:
            self._release_strays(session)
        self._claim_lost = ask is not None
        try:
            turn = self._claiming.turn(session, endings, ask)
        except psycopg.Error as error:
            self._telemetry.count("venturi.settle_errors", bool(endings))
            if not (endings and _about_data(error)):
                raise
            self._settle_apart(runs)
            return
        self._telemetry.record(
            "messaging.client.operation.duration", time.monotonic() - now, messaging__operation__type="receive"
        )
        self._claim_lost = False
        self._ended = []
        self._settled(runs, turn.unsettled)
        self._start(turn.claims, now)
        if ask is not None:
            self._looks.looked(len(turn.claims), ask.count, turn.seen)

    def _settled(self, runs: Sequence[Run], unsettled: Sequence[Unsettled]) -> None:
        answers = {(answer.key, answer.run_count): answer for answer in unsettled}
        if any(answer.ours for answer in unsettled):
            self._locked_until = time.monotonic() + random.uniform(0.05, 0.1)
        recorded: list[Run] = []
        for run in runs:
            answer = answers.get((run.claim.key, run.claim.run_count)) if answers else None
            if answer is None or answer.done:
                recorded.append(run)
            elif answer.ours:
                self._locked.append(run)
            else:
                self._let_go([run])
                self.refused(run, "lost")
        self._let_go(recorded)
        self._recorded(recorded)

    def _unlock(self) -> None:
        """Ask again for the runs whose rows were locked."""
        self._ended = self._ended + self._locked
        self._locked = []

    def _release_strays(self, session: Session) -> None:
        """Give back what a claim took whose answer was lost, instead of letting its lease run out as a failure."""
        known = [(run.claim.key, run.claim.run_count) for run in self._flight.all()]
        endings = self._claiming.strays(session, *self._lanes.all(), known)
        if endings:
            self._claiming.settle(session, endings)
        self._claim_lost = False

    def _settle_apart(self, runs: Sequence[Run]) -> None:
        """Settle one by one, and in reduced form what the database refuses, when it has refused the batch."""
        for run in list(runs):
            ending = t.cast(Ending, run.ending)
            session = self._part.session()
            try:
                answer = self._claiming.settle(session, [ending])
            except psycopg.Error as error:
                if not _about_data(error):
                    raise
                reduced = _reduced(ending, error)
                answer = self._claiming.settle(session, [reduced])
                run.ending = reduced
            self._ended.remove(run)
            self._settled([run], answer)

    def _start(self, claims: Sequence[Claim], sent: float) -> None:
        runs = [Run(claim, self._registry.find(claim.kind), RunSignal(sent + self._settings.lease)) for claim in claims]
        self._lanes.claimed(claims)
        self._flight.add(runs)
        # When a stop came while the claim was on its way, the runs are told before they begin, and so do not begin.
        self._stopping()
        self._claimed(runs)
        self._slots.hand(runs)

    def _next_due(self) -> float | None:
        return self._claiming.next_due(self._part.session(), *self._lanes.open())

    # --- Bookkeeping

    def _claimed(self, runs: Sequence[Run]) -> None:
        waits: dict[str, list[float]] = {}
        for run in runs:
            waits.setdefault(run.claim.kind, []).append(run.claim.waited)
        for kind, waited in waits.items():
            self._telemetry.count("messaging.client.consumed.messages", len(waited), venturi__kind=kind)
            self._telemetry.record("venturi.claim.latency", *waited, venturi__kind=kind)
        if logger.isEnabledFor(logging.DEBUG):
            for run in runs:
                self._log(logging.DEBUG, run, "claimed")

    def _let_go(self, runs: Sequence[Run]) -> None:
        self._flight.remove(runs)
        self._lanes.ended(run.claim.kind for run in runs)

    def _recorded(self, runs: Sequence[Run]) -> None:
        self.settled += len(runs)
        ends = collections.Counter((run.claim.kind, t.cast(Ending, run.ending).outcome) for run in runs)
        for (kind, outcome), number in ends.items():
            self._telemetry.count("venturi.settled", number, venturi__kind=kind, venturi__outcome=outcome)
            if outcome == "released":
                self._telemetry.count("venturi.released", number, venturi__kind=kind)
        lowest = logging.DEBUG if logger.isEnabledFor(logging.DEBUG) else logging.INFO
        for run in runs:
            outcome = t.cast(Ending, run.ending).outcome
            level = _LEVELS.get(outcome, logging.DEBUG)
            if level >= lowest:
                self._log(level, run, outcome)

    def _log(self, level: int, run: Run, what: str) -> None:
        logger.log(
            level, "job %s of kind %s: run %d %s", run.claim.key, run.claim.kind, run.claim.run_count, what,
            extra=run.tags(self._claiming.owner),
        )  # fmt: skip


def _about_data(error: psycopg.Error) -> bool:
    """Whether the database refuses what is to be stored, and would refuse it again.

    Classes 22 data exception, 23 constraint, 54 program limit, P0 raised by a trigger
    (PostgreSQL documentation, appendix A).
    """
    return (error.sqlstate or "")[:2] in ("22", "23", "54", "P0")


def _reduced(ending: Ending, error: psycopg.Error) -> Ending:
    """The end of a run without what the user's code put into it, for a database that refuses that."""
    note = f"the database refused to store all of this entry (SQLSTATE {error.sqlstate})"
    lost_carry = ending.outcome == "paused" and ending.carry is not None
    outcome = "dead" if lost_carry else ending.outcome
    return attrs.evolve(ending, outcome=outcome, note=note, traceback=None, evidence=None, carry=None)
