"""The thread that keeps claims alive: heartbeat, renewal, requests to cancel, and recovery of what dead workers held.

It has a session of its own, so that it works while all slots are busy and while the coordinator waits. Its interval
is a third of the lease: a renewal may fail once and the lease still holds. After trouble with the database it renews
first and recovers nothing for one interval, since the other workers may not have come back to renew theirs.
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress

import psycopg

from venturi.backoff import jittered
from venturi.errors import UnknownKindError
from venturi.log import Log, log
from venturi.registry import Registry
from venturi.store.claiming import RECOVERY_BATCH, Claiming, Ending, Expired
from venturi.store.connections import Session
from venturi.telemetry import Telemetry
from venturi.worker.flight import Flight, Run
from venturi.worker.outages import Outages, Retry
from venturi.worker.refusals import Refused, about_data, settle
from venturi.worker.runner import LEAST_DELAY
from venturi.worker.settings import Settings
from venturi.worker.threads import Part, spawn

__all__ = ["Maintainer"]

logger: Log = log("venturi.worker")

LOOK_EVERYWHERE = 20
"""Every so many recoveries look at all live rows, in case a claim stands where none is expected."""

LONG_RUN = 600.0
"""Seconds after which a run is reported, and again whenever it has taken twice as long: one that hangs shows nowhere
else, since its claim is renewed like any other."""


class Maintainer:
    """Maintains one worker's claims.

    Args:
        connect: Opens its session.
        failed: Called when it cannot go on for good.
    """

    def __init__(
        self,
        connect: Callable[[], Session],
        claiming: Claiming,
        flight: Flight,
        registry: Registry,
        settings: Settings,
        telemetry: Telemetry,
        outages: Outages,
        *,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._part = Part("maintainer", connect, outages, Retry(0.5, 5.0))
        self._claiming = claiming
        self._flight = flight
        self._registry = registry
        self._settings = settings
        self._telemetry = telemetry
        self._failed = failed
        self._interval = settings.lease / 3
        self._poked = threading.Event()
        self._stopping = False
        self._due = 0.0
        self._recover_from = 0.0
        self._recoveries = 0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, with a first heartbeat and a first recovery at once."""
        self._thread = spawn("venturi-maintainer", self._run)

    def poke(self) -> None:
        """Look at the requests to cancel now; after trouble, try to connect now."""
        self._poked.set()

    def stop(self, timeout: float) -> None:
        """End the thread, taking this worker's row with it."""
        self._stopping = True
        self._poked.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        try:
            while not self._stopping:
                wait = self._part.attempt(self._step)
                if wait:
                    self._recover_from = math.inf
                self._poked.wait(wait or max(0.0, self._due - time.monotonic()))
            self._part.attempt(lambda: self._claiming.leave(self._part.session()))
        except BaseException as error:
            self._failed(error)
        finally:
            self._part.disconnect()

    def _step(self) -> None:
        self._poked.clear()
        session = self._part.session()
        if time.monotonic() < self._due:
            self._tell(session, self._flight.all())
            return
        self._renew(session)
        self._claiming.heartbeat(session)
        self._tell(session, self._flight.all())
        now = time.monotonic()
        if self._recover_from == math.inf:
            self._recover_from = now + self._interval
        if now >= self._recover_from:
            self._recover(session)
        self._due = now + self._interval

    # --- Own claims

    def _renew(self, session: Session) -> None:
        # A run past its timeout is left to recovery: its handler was told, and does not listen.
        held = (run for run in self._flight.all() if run.ending is not None or not run.signal.overdue)
        runs = {run.claim.key: run for run in held}
        if not runs:
            return
        sent = time.monotonic()
        answers = self._claiming.renew(session, [(key, run.claim.run_count) for key, run in runs.items()])
        for key, renewed, ours in answers:
            run = runs[key]
            if renewed:
                run.signal.lease_end = sent + self._settings.lease
                self._watch(run, sent)
            elif not ours and run.ending is None and self._flight.holds(run):
                self._lost(run)

    def _watch(self, run: Run, now: float) -> None:
        if run.renewed_from is None:
            run.renewed_from = now
        lasted = now - run.renewed_from
        if run.thread and lasted >= LONG_RUN * 2**run.reports:
            run.reports += 1
            logger.warning(
                "job %s of kind %s: run %d has not ended after %d s on thread %s",
                run.claim.key, run.claim.kind, run.claim.run_count, lasted, run.thread,
                extra=run.tags(self._claiming.owner),
            )  # fmt: skip

    def _lost(self, run: Run) -> None:
        if run.signal.reason is None:
            logger.warning(
                "job %s of kind %s: the claim of run %d is lost", run.claim.key, run.claim.kind, run.claim.run_count,
                extra=run.tags(self._claiming.owner),
            )  # fmt: skip
        run.signal.tell("lease lost")

    def _tell(self, session: Session, runs: Sequence[Run]) -> None:
        held = {run.claim.key: run for run in runs}
        for key, number in self._claiming.cancels(session, list(held)):
            if held[key].claim.run_count >= number:
                held[key].signal.tell("operator")

    # --- Claims of others

    def _recover(self, session: Session) -> None:
        self._recoveries += 1
        everywhere = self._recoveries % LOOK_EVERYWHERE == 1
        end = time.monotonic() + self._interval  # there are claims of its own to be renewed
        while not self._stopping and time.monotonic() < end:
            expired = self._claiming.expired(session, everywhere=everywhere)
            endings = [self._ending(claim) for claim in expired]
            if endings and not self._take_back(session, endings):
                return  # other workers are at it
            if len(expired) < RECOVERY_BATCH:
                return

    def _take_back(self, session: Session, endings: Sequence[Ending]) -> int:
        """Recover claims; how many of them are not among the expired any more."""
        unsettled, refused = settle(self._claiming, session, endings, expired=True)
        left = {(u.key, u.run_count) for u in unsettled} | {(r.ending.key, r.ending.run_count) for r in refused}
        self._report([e for e in endings if (e.key, e.run_count) not in left])
        put_off = sum(self._put_off(session, each) for each in refused)
        return len(endings) - len(left) + put_off

    def _put_off(self, session: Session, refused: Refused) -> bool:
        """Try it again after a lease: among the first hundred of the expired it would keep out all others."""
        refused.report()
        ending = refused.ending
        try:
            ((_, renewed, _),) = self._claiming.renew(session, [(ending.key, ending.run_count)], owner=ending.owner)
        except psycopg.Error as error:
            if not about_data(error):
                raise
            return False
        return renewed

    def _ending(self, claim: Expired) -> Ending:
        who = claim.worker or f"worker {claim.owner}"
        note = f"the lease of {who} ran out in run {claim.run_count}"
        failure = claim.failure_count + 1
        if claim.cancel:
            return Ending(claim.key, claim.kind, claim.run_count, claim.owner, "cancelled", note=note)
        if self._settings.backstop is not None and failure >= self._settings.backstop:
            return Ending(claim.key, claim.kind, claim.run_count, claim.owner, "dead", note=note)
        delay = max(LEAST_DELAY, self._backoff(claim.kind, uuid.UUID(claim.key), failure))
        return Ending(claim.key, claim.kind, claim.run_count, claim.owner, "recovered", delay=delay, note=note)

    def _backoff(self, kind: str, job: uuid.UUID, failure: int) -> int:
        curve = self._settings.backoff
        with suppress(UnknownKindError):  # a kind of other workers
            curve = self._registry.find(kind).task.backoff or curve
        return jittered(curve, job, failure, self._settings.jitter) // 1000

    def _report(self, endings: Sequence[Ending]) -> None:
        for ending in endings:
            logger.warning(
                "job %s of kind %s: %s; %s", ending.key, ending.kind, ending.note, ending.outcome,
                extra={
                    "job": ending.key, "kind": ending.kind, "run": ending.run_count, "worker": str(ending.owner)
                },
            )  # fmt: skip
            self._telemetry.count("venturi.recovered", venturi__kind=ending.kind)
