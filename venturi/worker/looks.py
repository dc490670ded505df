"""When a worker looks for jobs.

With nothing to claim it goes through three states, each of which ends as soon as something is claimed:

lingering  for 50 ms it looks again after a quarter of the time that it has been lingering. Nobody notifies it
           meanwhile, so that producers with workers that keep up pay for no notification. It lingers up to 1 s when it
           was woken as soon as it had parked.
parking    it asks the listener for PARKED (`venturi.store.doorbell`), and polls, ever slower, while that is not safe
parked     it has claimed once more, and sleeps until a notification, the next due time, or the poll interval
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from venturi.worker.listener import Listener, Parking
from venturi.worker.marks import Marks
from venturi.worker.outages import Retry

__all__ = ["Looks"]

LINGER = 0.05
LONGEST_LINGER = 1.0
RESTLESS = 0.1
"""Woken within so many seconds of parking: parking did not pay."""

CALM = 1.0
"""Seconds without a call after which calls that were in vain are forgotten."""


class Looks:
    """The looks for jobs of one worker.

    Args:
        listener: None where nothing can be listened to: the worker polls.
        next_due: Seconds until the first job that it may claim is due, below 0 when one is ready; None: there is none.
        poll: Seconds between looks at most.

    Attributes:
        due: The monotonic instant of the next one.
    """

    def __init__(
        self, listener: Listener | None, marks: Marks, next_due: Callable[[], float | None], poll: float
    ) -> None:
        self.due: float = 0.0
        self._listener = listener
        self._marks = marks
        self._next_due = next_due
        self._poll = poll
        # Monotonic instants: since when there are no jobs, and of parking.
        self._dry_since: float | None = None
        self._parked_at: float | None = None
        self._linger = LINGER
        self._park_retry = Retry(0.02, 1.0)
        self._contested = False
        self._called_at = 0.0
        self._in_vain = 0

    def called(self) -> None:
        """Something may have come: look again, at everything; the later, the more often that was in vain just now."""
        now = time.monotonic()
        if now - self._called_at > CALM:
            self._in_vain = 0
        self._called_at = now
        self.due = min(self.due, now + min(0.001 * (2 ** min(self._in_vain, 8) - 1), 0.2))
        self._in_vain += 1
        self._marks.ignore()
        if self._parked_at is not None and time.monotonic() - self._parked_at < RESTLESS:
            self._linger = min(self._linger * 2, LONGEST_LINGER)

    def looked(self, claimed: int, asked: int, seen: int) -> None:
        """Note what a look has found: how many jobs were claimed, asked for, and there for the taking."""
        now = time.monotonic()
        if claimed:
            self._active()
        if claimed == asked or (seen > claimed and not self._contested):
            # There may be more; or others were faster with some, and the quotas are open now.
            self._contested = seen > claimed
            self.due = 0.0
            return
        self._contested = False
        if seen > claimed:
            self.due = now + random.uniform(0.05, 0.1)
            return
        if self._dry_since is None:
            self._dry_since = now
        self.due = now + self._wait(now - self._dry_since)

    def leave(self) -> None:
        """Give PARKED up."""
        if self._listener is not None:
            self._listener.leave()

    def _active(self) -> None:
        self._dry_since = None
        self._in_vain = 0
        self._park_retry.reset()
        if self._parked_at is not None:
            if time.monotonic() - self._parked_at >= RESTLESS:
                self._linger = LINGER
            self._parked_at = None
        self.leave()

    def _wait(self, dry: float) -> float:
        """Seconds until the next look, after one that found nothing; see the states above."""
        if dry < self._linger:
            return min(max(dry / 4, 0.001), 0.02)
        parking = Parking.AWAY if self._listener is None else self._listener.parking
        if self._listener is not None and parking is Parking.AWAKE:
            self._listener.park()
            return self._park_retry.wait()
        if self._listener is not None and parking is Parking.EARLY:
            self._listener.park()
            return min(self._park_retry.wait(), self._sleep())
        self._park_retry.reset()
        if self._parked_at is None:
            self._parked_at = time.monotonic()
        return self._sleep()

    def _sleep(self) -> float:
        """The time until the next job is due, at most the poll interval."""
        due = self._next_due()
        if due is None:
            return self._poll
        if due > 0:
            return min(due, self._poll)
        # Due already, but not to be claimed: somebody else holds it at this moment, and a mark may have passed it.
        self._marks.ignore()
        return random.uniform(0.05, 0.1)
