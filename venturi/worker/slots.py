"""The threads that run handlers: a pool whose every thread runs one long loop, since a hand-over through a queue
costs a third of a ``submit`` per run.

A thread that is woken takes runs until there are none, and wakes the next one before it calls a handler, as long as
none is on its way already. So handlers that wait have all the threads that they need within some microseconds each,
while those that end at once are run one after the other by a thread that is awake, without changing threads.
"""

from __future__ import annotations

import collections
import os
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from venturi.log import Log, log
from venturi.store.claiming import Ending
from venturi.worker.flight import Inbox, Run

__all__ = ["Slots"]

logger: Log = log("venturi.worker")


class Slots:
    """A fixed number of slots.

    Args:
        count: How many.
        name: Prefix of the threads' names.
        execute: Runs a claim to its end.
        interrupted: Gives the end of a run whose ``execute`` raised.
        inbox: Where the ended runs go.
    """

    def __init__(
        self,
        count: int,
        name: str,
        execute: Callable[[Run], Ending],
        interrupted: Callable[[Run], Ending],
        inbox: Inbox,
    ) -> None:
        self._count = count
        self._execute = execute
        self._interrupted = interrupted
        self._inbox = inbox
        self._process = os.getpid()
        self._runs: collections.deque[Run] = collections.deque()
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._waking = False
        self._closed = False
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name)
        self._started = 0
        self._starting = threading.Lock()

    def start(self) -> None:
        """Start the first thread, so that somebody runs what is handed over; the others are started at need.

        Raises:
            RuntimeError: There is none to be had.
        """
        self._pool.submit(self._loop)
        self._started = 1

    def hand(self, runs: Iterable[Run]) -> None:
        """Give runs to free slots."""
        self._runs.extend(runs)
        self._wake()

    def close(self, *, wait: bool) -> None:
        """End the loops. A handler that still runs goes on; without ``wait`` nobody waits for it here."""
        self._closed = True
        with self._starting:
            most, self._count = self._count, self._started
        # One that was cut short while it started a thread has not counted that.
        for _ in range(most):
            self._wakes.put(None)
        # What the pool keeps of a thread that it could not start is not to begin now.
        self._pool.shutdown(wait=wait, cancel_futures=True)

    def _wake(self) -> None:
        """Have one more thread look for runs, unless one is on its way."""
        if self._waking or not self._runs:
            return
        self._waking = True
        with self._starting:
            if self._started < self._count:
                self._add()
        self._wakes.put(None)

    def _add(self) -> None:
        """Start one more thread. Where there is none to be had, those that run take all runs in turn from now on."""
        try:
            self._pool.submit(self._loop)
        except RuntimeError:
            logger.warning(
                "no more than %d of %d slots can be used: no thread can be started", self._started, self._count
            )
            self._count = self._started
        else:
            self._started += 1

    def _loop(self) -> None:
        held: collections.deque[Run] = collections.deque()
        while held or not self._closed:
            try:
                self._serve(held)
            except BaseException:
                # Raised in this thread by another one, which meant a handler and came too late for it.
                self._wakes.put(None)
                logger.exception("an exception that came from without has met no handler")

    def _serve(self, held: collections.deque[Run]) -> None:
        """Run what is handed over, until the end. Such an exception may cut it short anywhere; ``held`` has the run."""
        if held:
            self._end(held)
        while not self._closed:
            self._wakes.get()
            # First of all: whoever hands over a run from now on wakes somebody for it.
            self._waking = False
            self._run_all(held)

    def _run_all(self, held: collections.deque[Run]) -> None:
        while self._runs:
            try:
                # In one step: no exception comes between taking a run and holding it.
                held.extend(map(collections.deque[Run].popleft, (self._runs,)))
            except IndexError:
                return  # another thread was faster
            self._wake()
            self._run(held[0])
            self._end(held)

    def _run(self, run: Run) -> None:
        try:
            run.ending = self._execute(run)
        finally:
            if os.getpid() != self._process:
                # The handler has forked, and this child has left it: nobody else would ever end it.
                os._exit(0)

    def _end(self, held: collections.deque[Run]) -> None:
        """Hand the run over, for the second time if need be; nothing of it is kept."""
        if held[0].ending is None:
            held[0].ending = self._interrupted(held[0])
        self._inbox.put(held[0])
        held.clear()
