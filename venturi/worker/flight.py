"""The runs that a worker holds claims for, shared by its threads."""

from __future__ import annotations

import queue
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence

import attrs

from venturi.context import RunSignal
from venturi.registry import Bound
from venturi.store.claiming import Claim, Ending

__all__ = ["Flight", "Inbox", "Run"]


@attrs.define(eq=False)
class Run:
    """One claim on its way through a slot.

    Attributes:
        thread: Name of the thread that runs its handler; empty when that has not begun.
        ending: How it ended; None until then.
        received: Whether it was taken from the inbox.
        renewed_from: When its claim was first renewed, on the monotonic clock; None when it never was.
        reports: How often it was reported for taking long.
    """

    claim: Claim
    bound: Bound
    signal: RunSignal
    thread: str = ""
    ending: Ending | None = None
    received: bool = False
    renewed_from: float | None = None
    reports: int = 0

    def tags(self, worker: uuid.UUID) -> dict[str, object]:
        """What log records say of the run, as ``extra``."""
        claim = self.claim
        return {
            "job": claim.key, "kind": claim.kind, "run": claim.run_count, "worker": str(worker), "slot": self.thread
        }  # fmt: skip


class Flight:
    """The runs in flight: the coordinator adds and removes them, the maintainer renews them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[str, Run] = {}

    def add(self, runs: Sequence[Run]) -> None:
        """Take runs in. An earlier run of the same job, whose claim was lost, is told so and held no more."""
        with self._lock:
            overtaken = [self._runs[run.claim.key] for run in runs if run.claim.key in self._runs]
            self._runs.update((run.claim.key, run) for run in runs)
        for run in overtaken:
            run.signal.tell("lease lost")

    def remove(self, runs: Iterable[Run]) -> None:
        """Take runs out, those that still are in."""
        with self._lock:
            for run in runs:
                if self._runs.get(run.claim.key) is run:
                    del self._runs[run.claim.key]

    def holds(self, run: Run) -> bool:
        """Whether the run is in flight."""
        return self._runs.get(run.claim.key) is run

    def all(self) -> list[Run]:
        """The runs in flight."""
        with self._lock:
            return list(self._runs.values())

    def __len__(self) -> int:
        return len(self._runs)


class Inbox:
    """What the coordinator waits for: ended runs, and calls to look up. Safe to call from a signal handler."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Run | None] = queue.SimpleQueue()
        self._called = False
        self._late: Callable[[Run], None] | None = None

    def put(self, run: Run) -> None:
        """Hand over a run that has ended."""
        self._queue.put(run)
        self._pass_on()

    def close(self, late: Callable[[Run], None]) -> None:
        """Nobody takes anything from now on; runs that end later go to ``late``, on the thread of their slot."""
        self._late = late
        self._pass_on()

    def _pass_on(self) -> None:
        # After the run is in the queue, so that none stays there however close() and put() fall together.
        if self._late is not None:
            for run in self.take(0)[0]:
                self._late(run)

    def call(self) -> None:
        """Make the coordinator look up; many calls before it does are one."""
        if not self._called:
            self._called = True
            self._queue.put(None)

    def take(self, timeout: float) -> tuple[list[Run], bool]:
        """Wait for something, at most ``timeout`` seconds; gives the ended runs, and whether there was a call."""
        runs: list[Run] = []
        called = False
        try:
            item = self._queue.get(timeout=timeout) if timeout > 0 else self._queue.get_nowait()
            while True:
                if item is None:
                    # Before the rest is taken: a call from now on is about something that this look-up may miss.
                    self._called = False
                    called = True
                elif not item.received:  # a slot that was cut short may hand over a run for the second time
                    item.received = True
                    runs.append(item)
                item = self._queue.get_nowait()
        except queue.Empty:
            return runs, called
