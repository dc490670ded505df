"""The parts of a working worker, put together: what each thread has of its own, and what they share."""

from __future__ import annotations

import datetime as dt
import os
import socket
import time
import uuid
from collections.abc import Callable, Set

from venturi.log import Log, log
from venturi.registry import Registry
from venturi.store.claiming import Claiming, WorkerRow
from venturi.store.store import Store
from venturi.telemetry import Telemetry
from venturi.text import note
from venturi.values import Released, Report
from venturi.worker.coordinator import Coordinator
from venturi.worker.flight import Flight, Inbox, Run
from venturi.worker.lanes import Lanes
from venturi.worker.listener import ANSWER_SECONDS, Listener
from venturi.worker.maintainer import Maintainer
from venturi.worker.marks import Marks
from venturi.worker.outages import Outages
from venturi.worker.rotation import Rotation
from venturi.worker.runner import Runner
from venturi.worker.settings import Settings
from venturi.worker.slots import Slots

__all__ = ["GRACE", "Parts", "host"]

logger: Log = log("venturi.worker")

GRACE = 4.0
"""Seconds after the deadline of a stop in which its last statements have to be answered."""


def host() -> str:
    """The machine's name, storable whatever it is."""
    return note(socket.gethostname() or "?")[:255]


class Parts:
    """Coordinator, listener, maintainer and slots of one worker.

    Args:
        id: The worker's identity; its claims carry it.
        name: The worker in words.
        state: Given to every handler.
        stopping: Whether the worker is to stop, in which case all runs in flight have been told.
        patience: Gives the longest wait, in seconds, for an answer of the database.
        failed: Called when an internal thread cannot go on for good.
    """

    def __init__(
        self,
        id: uuid.UUID,
        name: str,
        settings: Settings,
        store: Store,
        registry: Registry,
        telemetry: Telemetry,
        state: object,
        flight: Flight,
        inbox: Inbox,
        *,
        stopping: Callable[[], bool],
        patience: Callable[[], float],
        failed: Callable[[BaseException], None],
    ) -> None:
        marks, outages = Marks(), Outages(name)
        lanes = Lanes(registry, settings.concurrency, Rotation(settings.priority_ratio), marks)
        row = WorkerRow(
            id, host(), os.getpid(), settings.concurrency, lanes.kinds, dt.timedelta(seconds=settings.lease)
        )
        claiming = Claiming(store.statements, row)
        runner = Runner(id, settings, state, telemetry, store.history)
        self._id = id
        self._name = name
        self._inbox = inbox
        self._lanes = lanes
        self._store = store
        self._telemetry = telemetry
        self._slots = Slots(settings.concurrency, f"venturi-{store.schema}", runner, runner.interrupted, inbox)
        self._maintainer = Maintainer(
            lambda: store.session("venturi maintainer", patience),
            claiming,
            flight,
            registry,
            settings,
            telemetry,
            outages,
            failed=failed,
        )
        outages.calls = [self._maintainer.poke]
        self._listener: Listener | None = None
        if store.listens:
            self._listener = Listener(
                lambda: store.listening_session(lambda: min(ANSWER_SECONDS, patience())),
                store.statements,
                store.statements.bells(lanes.kinds),
                self._open,
                outages,
                wake=inbox.call,
                cancel=self._maintainer.poke,
                reconnected=lambda: telemetry.count("venturi.listener.reconnects"),
                failed=failed,
            )
            outages.calls = [self._maintainer.poke, self._listener.retry]
        self.coordinator: Coordinator = Coordinator(
            lambda: store.session("venturi coordinator", patience),
            claiming,
            registry,
            lanes,
            marks,
            self._slots,
            flight,
            inbox,
            self._listener,
            settings,
            telemetry,
            outages,
            stopping=stopping,
        )

    def committed(self, kinds: Set[str] | None) -> None:
        """Look for jobs that were committed in this process, if there is room for their kinds; None: any kinds."""
        if kinds is None or not kinds.isdisjoint(self._open()):
            self._inbox.call()

    def _open(self) -> set[str]:
        return set(self._lanes.open()[0])

    def start(self) -> None:
        """Start the threads."""
        self._telemetry.observe(self._store.stats)
        self._slots.start()
        self._maintainer.start()
        if self._listener is not None:
            self._listener.start()

    def stop(self, deadline: float) -> Report:
        """Settle or give back what is in flight, end everything by then, and report."""
        try:
            self.coordinator.finish((deadline - time.monotonic()) / 2)
        finally:
            self._end(deadline)
        released = [run for run in self.coordinator.released if run.thread]
        for run in released:
            if run.ending is None:
                self._warn(run)
        return Report(
            self.coordinator.settled,
            tuple(Released(run.claim.id, run.claim.kind, run.thread) for run in released),
            tuple(self.coordinator.unsettled()),
        )

    def _warn(self, run: Run) -> None:
        logger.warning(
            "%s: job %s of kind %s was released, its handler still runs on thread %s",
            self._name, run.claim.id, run.claim.kind, run.thread, extra=run.tags(self._id),
        )  # fmt: skip

    def _end(self, deadline: float) -> None:
        self._telemetry.unobserve(self._store.stats)
        self._inbox.close(self.coordinator.late)
        self._slots.close(wait=not self.coordinator.occupied())
        self.coordinator.close()
        self._maintainer.stop(max(0.1, deadline - time.monotonic()))
        if self._listener is not None:
            self._listener.stop(max(0.1, deadline - time.monotonic()))
