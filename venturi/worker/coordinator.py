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
from venturi.worker.refusals import Refused, about_data, reduced, settle
from venturi.worker.settings import Settings
from venturi.worker.slots import Slots
from venturi.worker.threads import Part

__all__ = ["Coordinator"]

logger: Log = log("venturi.worker")

STRAYS_SECONDS = 0.5
"""Seconds in which a stop tries to give back what only may be there: claims whose answer was lost."""

_LEVELS = {"dead": logging.WARNING, "retried": logging.INFO, "released": logging.INFO}


class Coordinator:
    """Claims and settles for one worker.

    Args:
        connect: Opens its session.
        listener: None where nothing can be listened to: the worker polls.
        stopping: Whether the worker is to stop, in which case all runs in flight have been told.

    Attributes:
        settled: Runs whose end was recorded.
        released: Runs whose claims were given back at the end.
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
        self.released: list[Run] = []
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
        # The monotonic instant at which to look for claims that it does not know of, once the answer to one was lost.
        self._strays_at = math.inf
        self._stragglers: list[Run] = []

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
        # After trouble also with nothing to do, since the other parts wait until this one has reached the database.
        asked = bool(self._ended or self._trouble_until) or now >= self._strays_at
        if asked or (self._claims and now >= self._looks.due and self._lanes.room()):
            self._trouble_until = now + wait if (wait := self._part.attempt(self._turn)) else 0.0

    def busy(self) -> bool:
        """Whether there are runs in flight, or ends of runs to be recorded."""
        return len(self._flight) > 0

    def finish(self, grace: float) -> None:
        """Settle what has ended by now, and give the claims of all other handlers back, in one statement.

        Args:
            grace: Seconds in which to try again where a row is locked or the database cannot be reached.
        """
        self._claims = False
        self._ended.extend(self._recordable(self._inbox.take(0)[0]))
        self._unlock()
        settling = set(self._ended)
        self._stragglers = [run for run in self._flight.all() if run not in settling]
        began = time.monotonic()
        while (left := self._left(grace)) and time.monotonic() - began < left:
            wait = self._part.attempt(self._last_turn)
            if self._left(grace):
                time.sleep(min(max(wait, 0.02), 0.25))  # not the whole wait of an outage: there is no later

    def _left(self, grace: float) -> float:
        """Seconds for which what is left to be done at the end is worth trying."""
        if self._ended or self._locked or self._stragglers:
            return grace
        return min(grace, STRAYS_SECONDS) if self._strays_at < math.inf else 0.0

    def _last_turn(self) -> None:
        self._unlock()
        if self._strays_at < math.inf:
            self._release_strays(self._part.session())
        if self._ended:
            self._turn()
        if self._stragglers:
            self._give_back()

    def _give_back(self) -> None:
        """Release the claims of the stragglers in one statement; those whose rows are locked remain."""
        stragglers = self._stragglers
        endings = [self._release_of(run) for run in stragglers]
        unsettled, refused = self._release(self._part.session(), endings)
        answers = {answer.key: answer for answer in unsettled}
        stuck = {each.ending.key for each in refused}
        self._stragglers = []
        for run in stragglers:
            answer = answers.get(run.claim.key)
            if answer is not None and answer.ours:
                self._stragglers.append(run)
            elif run.claim.key not in stuck:
                # Also one whose claim was lost: its job is in the hands of others.
                self._flight.remove([run])
                if answer is None or answer.done:
                    self._given_back(run)

    def _given_back(self, run: Run) -> None:
        self.released.append(run)
        if not run.thread:
            self.settled += 1  # as if it had told so itself, that it does not begin
        self._telemetry.count("venturi.released", venturi__kind=run.claim.kind)

    def _release_of(self, run: Run) -> Ending:
        claim = run.claim
        note = "the worker stopped while the handler ran" if run.thread else "not started: shutdown"
        return Ending(claim.key, claim.kind, claim.run_count, self._claiming.owner, "released", note=note)

    def late(self, run: Run) -> None:
        """Note that a run has ended when nothing is recorded any more; one that gave way has nothing to be recorded."""
        if t.cast(Ending, run.ending).outcome == "released":
            return
        if self._flight.holds(run):
            self._refused(run, "the worker had stopped")
        else:
            self._refused(run, f"its claim was {'released' if run in self.released else 'lost'}")

    def occupied(self) -> bool:
        """Whether there are handlers that hold a slot, whoever has the claim."""
        return self._lanes.running > 0

    def unsettled(self) -> list[uuid.UUID]:
        """Runs whose end could not be recorded, nor their claim given back."""
        return [run.claim.id for run in self._flight.all()]

    def close(self) -> None:
        """Close the session."""
        self._part.disconnect()

    def _patience(self) -> float:
        """Seconds until there is something to do even if nothing happens."""
        now = time.monotonic()
        moments = [self._strays_at]
        if self._ended or self._trouble_until:
            moments.append(now)
        if self._locked:
            moments.append(self._locked_until)
        if self._claims and self._lanes.room():
            moments.append(self._looks.due)
        return min(max(min(moments), self._trouble_until) - now, 30.0)

    def _recordable(self, ended: Sequence[Run]) -> list[Run]:
        """The runs whose end is to be recorded; what was overtaken by a later claim of the same job is let go."""
        kept: list[Run] = []
        for run in ended:
            if self._flight.holds(run):
                kept.append(run)
            else:
                self._drop(run, "its claim was lost")
        return kept

    # --- A turn

    def _turn(self) -> None:
        now = time.monotonic()
        runs = self._ended
        endings = [t.cast(Ending, run.ending) for run in runs]
        ask = self._lanes.ask(now, [run.claim.kind for run in runs]) if self._claims else None
        session = self._part.session()
        if now >= self._strays_at:
            self._release_strays(session)
        strays_at = self._strays_at
        if ask is not None:
            self._strays_at = 0.0  # until the answer is here
        try:
            turn = self._claiming.turn(session, endings, ask)
        except psycopg.Error as error:
            self._telemetry.count("venturi.settle_errors", bool(endings))
            if not (endings and about_data(error)):
                raise
            self._strays_at = strays_at  # nothing was claimed
            self._settle_apart(session, runs)
            return
        self._telemetry.record(
            "messaging.client.operation.duration", time.monotonic() - now, messaging__operation__type="receive"
        )
        self._strays_at = strays_at
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
            answer = answers.get((run.claim.key, run.claim.run_count))
            if answer is None or answer.done:
                recorded.append(run)
            elif answer.ours:
                self._locked.append(run)
            else:
                self._drop(run, "its claim was lost")
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
        unsettled, _ = self._release(session, endings) if endings else ([], [])
        locked = any(answer.ours for answer in unsettled)
        self._strays_at = time.monotonic() + random.uniform(0.05, 0.1) if locked else math.inf

    def _release(self, session: Session, endings: Sequence[Ending]) -> tuple[list[Unsettled], list[Refused]]:
        """Give claims back; those that the database refuses are left to run out."""
        unsettled, refused = settle(self._claiming, session, endings)
        for each in refused:
            each.report()
        return unsettled, refused

    def _settle_apart(self, session: Session, runs: Sequence[Run]) -> None:
        """Settle one by one after a refusal; in reduced form, or not at all, what is refused by itself too."""
        for run in list(runs):
            answers, refused = settle(self._claiming, session, [t.cast(Ending, run.ending)])
            if refused:
                run.ending = reduced(refused[0])
                answers, refused = settle(self._claiming, session, [run.ending])
            self._ended.remove(run)
            if refused:
                # Not for the sake of what the run has left, then: its lease is left to run out.
                self._drop(run, f"the database refuses it (SQLSTATE {refused[0].code})")
            else:
                self._settled([run], answers)

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

    def _drop(self, run: Run, why: str) -> None:
        self._let_go([run])
        self._refused(run, why)

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

    def _refused(self, run: Run, why: str) -> None:
        """Note that the result of a run is not recorded."""
        self._telemetry.count("venturi.lost_claims", venturi__kind=run.claim.kind)
        logger.warning(
            "job %s of kind %s: the result of run %d is not recorded, %s",
            run.claim.key, run.claim.kind, run.claim.run_count, why, extra=run.tags(self._claiming.owner),
        )  # fmt: skip

    def _log(self, level: int, run: Run, what: str) -> None:
        logger.log(
            level, "job %s of kind %s: run %d %s", run.claim.key, run.claim.kind, run.claim.run_count, what,
            extra=run.tags(self._claiming.owner),
        )  # fmt: skip
