"""The options of a worker."""

from __future__ import annotations

import datetime as dt
import os
import threading
import typing as t

import attrs

from venturi import checks
from venturi.backoff import YEAR, Backoff
from venturi.errors import ConfigError

__all__ = ["Settings", "WorkOptions"]


class WorkOptions(t.TypedDict, total=False):
    """Options of ``work()``. Times are seconds or timedeltas.

    Attributes:
        concurrency: Handlers that run at once, each on a thread, 1 to 10,000. Default: half the cores, from 1 to 8.
        poll: Longest wait of an idle worker before it looks for jobs, 1 ms to 1 h. Default: 30.
        lease: How long a claim outlives its worker, 1 s to 365 days; renewed at a third. Default: 60.
        shutdown_timeout: How long a stopping worker waits for its handlers, up to 365 days; 0 releases their jobs at
            once. Default: 30.
        backoff: The curve of retries of tasks without one. Default: 1 s, 1, 2, 3, 5 ... times, up to 1 h.
        jitter: Largest share that is taken off a delay, 0 to 1. Default: 0.5.
        backstop: Failures until a job is dead, at least 1; None never gives up. Default: 25, some 6 to 8 hours.
        priority_ratio: How often a tier goes before the next one, at least 2; None is strict. Default: 4, which is 12
            HIGH, 3 NORMAL and 1 LOW of 16.
        stop: Setting this event stops the worker. Default: None.
        signals: Whether SIGTERM and SIGINT stop a worker that blocks the main thread. Default: True.
    """

    concurrency: int
    poll: float | dt.timedelta
    lease: float | dt.timedelta
    shutdown_timeout: float | dt.timedelta
    backoff: Backoff
    jitter: float
    backstop: int | None
    priority_ratio: int | None
    stop: threading.Event | None
    signals: bool


@attrs.frozen
class Settings:
    """The options, checked; times in seconds."""

    concurrency: int
    poll: float
    lease: float
    shutdown_timeout: float
    backoff: Backoff
    jitter: float
    backstop: int | None
    priority_ratio: int | None
    stop: threading.Event | None
    signals: bool

    @classmethod
    def of(cls, options: t.Mapping[str, t.Any]) -> Settings:
        """The settings that the options give, with the defaults of `WorkOptions`.

        Raises:
            ConfigError: An option is unknown or out of its bounds.
        """
        unknown = options.keys() - WorkOptions.__annotations__.keys()
        if unknown:
            raise ConfigError(f"work() has no option {sorted(unknown)[0]!r}")
        get = options.get
        backstop, ratio = get("backstop", 25), get("priority_ratio", 4)
        return cls(
            concurrency=checks.whole("concurrency", get("concurrency", _concurrency()), 1, 10_000),
            poll=checks.seconds("poll", get("poll", 30.0), 0.001, 3600),
            lease=checks.seconds("lease", get("lease", 60.0), 1, YEAR),
            shutdown_timeout=checks.seconds("shutdown_timeout", get("shutdown_timeout", 30.0), 0, YEAR),
            backoff=checks.instance("backoff", get("backoff", Backoff()), Backoff),
            jitter=checks.fraction("jitter", get("jitter", 0.5)),
            backstop=None if backstop is None else checks.whole("backstop", backstop, 1),
            priority_ratio=None if ratio is None else checks.whole("priority_ratio", ratio, 2),
            stop=None if get("stop") is None else checks.instance("stop", get("stop"), threading.Event),
            signals=checks.flag("signals", get("signals", True)),
        )


def _concurrency() -> int:
    return max(1, min(8, (os.cpu_count() or 1) // 2))
