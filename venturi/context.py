"""What a running handler can ask and say: its context, and the signal that tells it to stop."""

from __future__ import annotations

import contextvars
import datetime as dt
import logging
import math
import os
import threading
import time
import typing as t
import uuid
from collections.abc import Callable, MutableMapping

from typing_extensions import TypeVar

from venturi.errors import Cancelled, ConfigError, LeaseLost, Reason
from venturi.values import Entry, Priority

__all__ = ["Cancellation", "Context", "Pending", "RunSignal", "current_context", "enter"]

T = TypeVar("T")
C = TypeVar("C", default=None)
S = TypeVar("S", default=None)

_telling = threading.Lock()
"""Held for a moment while a run is told to stop, or begins to wait for it; one for all runs, since both are rare."""


def _renew_telling() -> None:
    global _telling
    _telling = threading.Lock()


os.register_at_fork(after_in_child=_renew_telling)  # another thread may have held it, and is not there to let go

_logger = logging.getLogger("venturi.handler")
_current: contextvars.ContextVar[Context[t.Any, t.Any]] = contextvars.ContextVar("venturi_context")


class RunSignal:
    """Where a worker tells one run to stop, and the reasons that the clock gives by itself.

    A timeout and the end of the lease are read off the monotonic clock by whoever asks, so that they are noticed
    even while the database, and with it every thread that speaks to it, hangs.

    Attributes:
        lease_end: When the claim ends unless renewed, on the monotonic clock.
        timeout_at: When the run has taken too long; None without a timeout.
        by_operator: Whether somebody has asked to cancel the job, be it after another reason.
    """

    __slots__ = ("_event", "_reason", "by_operator", "lease_end", "timeout_at")

    def __init__(self, lease_end: float) -> None:
        self.lease_end: float = lease_end
        self.timeout_at: float | None = None
        self.by_operator: bool = False
        self._reason: Reason | None = None
        self._event: threading.Event | None = None

    @property
    def reason(self) -> Reason | None:
        """Why the run is to stop; the first reason stays. None: it is not."""
        if self._reason is None:
            if self.overdue:
                self.tell("timeout")
            elif time.monotonic() >= self.lease_end:
                self.tell("lease lost")
        return self._reason

    @property
    def overdue(self) -> bool:
        """Whether the run has taken too long, whatever it was told first."""
        return self.timeout_at is not None and time.monotonic() >= self.timeout_at

    def tell(self, reason: Reason) -> None:
        """Tell the run to stop."""
        with _telling:
            self.by_operator = self.by_operator or reason == "operator"
            if self._reason is None:
                self._reason = reason
            if self._event is not None:
                self._event.set()

    def wait(self, timeout: float | None) -> bool:
        """Wait for a reason, at most ``timeout`` seconds; whether there is one."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        if math.isnan(end):
            raise ConfigError(f"timeout={timeout!r}: must be a number of seconds")
        with _telling:
            event = self._event = self._event or threading.Event()
        while self.reason is None:
            now = time.monotonic()
            if now >= end:
                return False
            # A renewal moves the end of the lease while this waits, so that it is looked at again at each end.
            ends = min(end, self.lease_end, math.inf if self.timeout_at is None else self.timeout_at)
            event.wait(min(max(0.0, ends - now), threading.TIMEOUT_MAX))
        return True


class Cancellation:
    """Tells a run to stop, and why. Like an Event, but with a reason, and only the worker can set it."""

    def __init__(self, signal: RunSignal) -> None:
        self._signal = signal

    @property
    def reason(self) -> Reason | None:
        """``shutdown``, ``timeout``, ``lease lost`` or ``operator``; the first one stays. None: not told to stop."""
        return self._signal.reason

    def is_set(self) -> bool:
        """Whether the run was told to stop."""
        return self._signal.reason is not None

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until told to stop.

        Args:
            timeout: Longest wait in seconds. Default: None, no bound; 0 does not wait.

        Returns:
            Whether the run was told to stop.

        Raises:
            ConfigError: ``timeout`` is not a number.
        """
        return self._signal.wait(timeout)

    def check(self) -> None:
        """Raise when the run was told to stop.

        Raises:
            LeaseLost: The reason is ``lease lost``.
            Cancelled: Another reason.
        """
        reason = self._signal.reason
        if reason == "lease lost":
            raise LeaseLost
        if reason is not None:
            raise Cancelled(reason)

    def __repr__(self) -> str:
        return f"<venturi.Cancellation {self.reason or 'not set'}>"


class Context(t.Generic[C, S]):
    """One run of a job, as its handler sees it.

    Attributes:
        kind: The kind of its task.
        run_count: 1 on the first run.
        failure_count: Failures so far.
        carry: The job's own state, changed in place or assigned; stored on pause and on retry. None without a carry
            type.
        cancelled: Tells this run to stop, with a reason.
        state: The very object given to ``work(state=)``.
        logger: Its records carry job id, kind and run number.
    """

    def __init__(
        self,
        *,
        id: uuid.UUID | str,
        kind: str,
        run_count: int,
        failure_count: int,
        carry: C,
        state: S,
        signal: RunSignal,
        evidence: dict[str, object],
        history: Callable[[], list[Entry]],
    ) -> None:
        self._id = id
        self.kind = kind
        self.run_count = run_count
        self.failure_count = failure_count
        self.carry = carry
        self.state = state
        self.cancelled: Cancellation = Cancellation(signal)
        self._signal = signal
        self._history = history
        self._read: list[Entry] | None = None
        self._evidence = evidence

    @property
    def id(self) -> uuid.UUID:
        """The job's id, the same on every run."""
        # Few handlers ask for it, and to make one takes longer than all the rest of a context.
        if isinstance(self._id, str):
            self._id = uuid.UUID(self._id)
        return self._id

    @property
    def history(self) -> list[Entry]:
        """The newest 50 entries of the job's journal, oldest first; one query, on the first read.

        Raises:
            psycopg.Error: The database cannot be reached; it never reads as empty then.
        """
        if self._read is None:
            self._read = self._history()
        return self._read

    @property
    def time_remaining(self) -> dt.timedelta | None:
        """Time until the run's timeout, never below zero; None without a timeout."""
        end = self._signal.timeout_at
        return None if end is None else dt.timedelta(seconds=max(0.0, end - time.monotonic()))

    @property
    def logger(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger whose records carry job id, kind and run number as ``job``, ``kind`` and ``run``."""
        return _Tagged(_logger, {"job": str(self._id), "kind": self.kind, "run": self.run_count})

    def attach(self, **evidence: object) -> None:
        """Record plain JSON data in this run's journal entry, also when the run fails.

        Args:
            evidence: Added to what was attached before, key by key. Left out of the entry, which then says so, when it
                cannot be encoded or takes over 64 KiB.
        """
        self._evidence.update(evidence)

    def __repr__(self) -> str:
        return f"<venturi.Context {self.kind} {self._id} run={self.run_count}>"


class Pending(t.Generic[T, C]):
    """The pending job that a new task of the same key may be merged into.

    Attributes:
        id: The job.
        task: Its decoded payload.
        carry: Its carry, the declared type's default if it was never set.
        age: Time since it was first enqueued, on the database's clock.
        visible_at: When it is due.
        asked_priority: The priority that the new enqueue asked for.
    """

    def __init__(
        self,
        *,
        id: uuid.UUID,
        task: T,
        carry: C,
        run_count: int,
        failure_count: int,
        priority: Priority,
        asked_priority: Priority,
        age: dt.timedelta,
        visible_at: dt.datetime,
        history: Callable[[], list[Entry]],
    ) -> None:
        self.id = id
        self.task = task
        self.carry = carry
        self.run_count = run_count
        self.failure_count = failure_count
        self.priority = priority
        self.asked_priority = asked_priority
        self.age = age
        self.visible_at = visible_at
        self._history = history
        self._read: list[Entry] | None = None

    @property
    def history(self) -> list[Entry]:
        """The newest 50 entries of the job's journal, oldest first; one query, on the first read."""
        if self._read is None:
            self._read = self._history()
        return self._read

    def __repr__(self) -> str:
        return f"<venturi.Pending {self.id} run_count={self.run_count}>"


def current_context() -> Context[t.Any, t.Any]:
    """The context of the run that this code is part of.

    Raises:
        ConfigError: No handler is running here.
    """
    try:
        return _current.get()
    except LookupError:
        raise ConfigError("current_context() is available inside a running handler only") from None


def enter(context: Context[t.Any, t.Any]) -> None:
    """Make the context the current one of this contextvars context."""
    _current.set(context)


class _Tagged(logging.LoggerAdapter[logging.Logger]):
    """Adds the run's tags to a record without dropping the caller's own ``extra``."""

    def process(self, msg: t.Any, kwargs: MutableMapping[str, t.Any]) -> tuple[t.Any, MutableMapping[str, t.Any]]:
        kwargs["extra"] = {**(self.extra or {}), **(kwargs.get("extra") or {})}
        return msg, kwargs
