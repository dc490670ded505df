"""Every exception of the library: one base, few leaves, the facts as attributes."""

from __future__ import annotations

import datetime as dt
import typing as t

__all__ = [
    "Cancelled",
    "ConfigError",
    "DuplicateKindError",
    "LeaseLost",
    "PayloadError",
    "PermanentError",
    "Reason",
    "RetryLater",
    "SchemaError",
    "UnknownKindError",
    "VenturiError",
]

Reason: t.TypeAlias = t.Literal["shutdown", "timeout", "lease lost", "operator"]
"""Why a running handler was told to stop."""


class VenturiError(Exception):
    """The base of every exception of this library; never raised itself."""


class ConfigError(VenturiError, ValueError):
    """A setting, argument, task class or handler is wrong; raised before any SQL is sent."""


class DuplicateKindError(ConfigError):
    """One queue was given two handlers, or two task classes, for one kind or alias."""


class UnknownKindError(VenturiError):
    """A registry was asked for a kind that it does not hold.

    Attributes:
        kind: The kind that was asked for.
    """

    def __init__(self, kind: str) -> None:
        super().__init__(f"no handler for the kind {kind!r} in this registry")
        self.kind = kind


class PayloadError(VenturiError):
    """A task, carry or key cannot be stored, or stored data cannot be decoded.

    Attributes:
        path: Where in the value, like ``$.items[2].name``.
        index: Position of the task in the sequence given to ``enqueue_many``; None elsewhere.
    """

    def __init__(self, problem: str, *, path: str = "$", index: int | None = None) -> None:
        where = path if index is None else f"task {index}, {path}"
        super().__init__(f"{where}: {problem}")
        self.problem = problem
        self.path = path
        self.index = index


class SchemaError(VenturiError):
    """The schema is missing or of an unknown version, or its migration records do not fit."""


class Cancelled(VenturiError):
    """Raised by ``ctx.cancelled.check()`` in a run that was told to stop.

    Attributes:
        reason: ``shutdown``, ``timeout``, ``lease lost`` or ``operator``.
    """

    def __init__(self, reason: Reason) -> None:
        super().__init__(f"the run was told to stop: {reason}")
        self.reason: Reason = reason


class LeaseLost(Cancelled):
    """The `Cancelled` of a run whose job may already run elsewhere: its claim is given back if it is still there."""

    def __init__(self) -> None:
        super().__init__("lease lost")


class PermanentError(VenturiError):
    """Raised by a handler: this job can never succeed, so it ends dead on this run."""


class RetryLater(VenturiError):
    """Raised by a handler: a failure, to be retried after exactly this delay.

    Args:
        delay: Time until the next run, without curve or jitter. Negative counts as zero.
        note: Text for the journal. None: the delay in words.
    """

    def __init__(self, delay: dt.timedelta, note: str | None = None) -> None:
        if not isinstance(delay, dt.timedelta):  # pyright: ignore[reportUnnecessaryIsInstance] - not all code is typed
            raise TypeError(f"delay must be a timedelta, not {type(delay).__name__}")
        super().__init__(note or f"retry in {delay}")
        self.delay = delay


for _name in __all__:
    if _name != "Reason":
        # Tracebacks show the path that users import.
        globals()[_name].__module__ = "venturi"
