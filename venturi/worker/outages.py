"""Database trouble: how long to wait before the next try, and one line in the log per change of state."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Sequence

import psycopg

from venturi.log import Log, log

__all__ = ["Outages", "Retry"]

logger: Log = log("venturi.worker")


class Retry:
    """Waits that double from ``first`` to ``longest`` seconds, each shortened by up to a tenth at random."""

    def __init__(self, first: float, longest: float) -> None:
        self._first = first
        self._longest = longest
        self._next = first

    def wait(self) -> float:
        """The next wait, in seconds."""
        wait, self._next = self._next, min(self._next * 2, self._longest)
        return wait * random.uniform(0.9, 1.0)

    def reset(self) -> None:
        """Begin again with the first wait."""
        self._next = self._first


LEADER = "coordinator"


class Outages:
    """Which parts of one worker cannot reach the database; the first to fail and the last to recover are logged.

    While the coordinator is among them, the others leave most of the trying to it, and are called when it has
    succeeded: so a server that comes back is not met by all threads of all workers, and all are back at once.

    Args:
        name: The worker, for the log.

    Attributes:
        calls: Called when a part works again while others do not yet.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._failing: set[str] = set()
        self._told = False
        self._began_at = -math.inf
        self.calls: Sequence[Callable[[], None]] = ()

    def began(self, part: str, error: Exception, since: float = math.inf) -> None:
        """Note that a part has met an error, on a session that it has had since that monotonic instant."""
        with self._lock:
            self._failing.add(part)
            # A session from before the last trouble has died in that, and is only found dead now.
            tell = not self._told and since >= self._began_at
            if tell:
                self._told, self._began_at = True, time.monotonic()
        if tell:
            logger.warning("%s: database trouble, trying again until it ends: %s", self._name, describe(error))

    def ended(self, part: str) -> None:
        """Note that a part works."""
        if part not in self._failing:
            return
        with self._lock:
            self._failing.discard(part)
            last = not self._failing
            tell = last and self._told
            if last:
                self._told = False
        if tell:
            logger.warning("%s: the database trouble is over", self._name)
        if not last:
            for call in self.calls:
                call()

    def follows(self, part: str) -> bool:
        """Whether the part may leave the trying to the coordinator."""
        return part != LEADER and LEADER in self._failing


def describe(error: Exception) -> str:
    """The error's type and code. Its text may hold a connection string or a row, so that it stays out of the log."""
    code = error.sqlstate if isinstance(error, psycopg.Error) else None
    return type(error).__name__ + (f" ({code})" if code else "")
