"""The threads that run handlers: a pool whose every thread runs one long loop, since a hand-over through a queue
costs a third of a ``submit`` per run.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from venturi.store.claiming import Ending
from venturi.worker.flight import Inbox, Run

__all__ = ["Slots"]


class Slots:
    """A fixed number of slots.

    Args:
        count: How many.
        name: Prefix of the threads' names.
        execute: Runs a claim to its end; must not raise.
        inbox: Where the ended runs go.
    """

    def __init__(self, count: int, name: str, execute: Callable[[Run], Ending | None], inbox: Inbox) -> None:
        self._count = count
        self._execute = execute
        self._inbox = inbox
        self._runs: queue.SimpleQueue[Run | None] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name)
        self._started = 0

    def hand(self, run: Run) -> None:
        """Give a run to the next free slot; its thread is started at the first need."""
        if self._started < self._count:
            self._started += 1
            self._pool.submit(self._loop)
        self._runs.put(run)

    def close(self, *, wait: bool) -> None:
        """End the loops. A handler that still runs goes on; without ``wait`` nobody waits for it here."""
        for _ in range(self._started):
            self._runs.put(None)
        self._pool.shutdown(wait=wait)

    def _loop(self) -> None:
        execute, inbox, take = self._execute, self._inbox, self._runs.get
        process = os.getpid()
        while (run := take()) is not None:
            run.ending = execute(run)
            if os.getpid() != process:
                # The handler has forked, and this child has left it: nobody else would ever end it.
                os._exit(0)
            inbox.put(run)
            del run  # nothing of a run is kept while waiting for the next one
