"""When a failed job is tried again: Fibonacci growth with a cap, and jitter that depends on the job alone.

The delay of failure n is ``min(base * fib(n), cap)``, shortened by up to the jitter's share of itself. The share is
drawn by SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014) from the job's id
and n, so that it is the same in every process and differs between jobs that fail together.
"""

from __future__ import annotations

import datetime as dt
import typing as t
import uuid

import attrs

from venturi import checks

__all__ = ["Backoff", "jittered"]

YEAR = 365 * 86400
"""Seconds; the longest backoff and lease."""

_MASK = (1 << 64) - 1


def _base(_: Backoff, __: object, value: object) -> None:
    checks.seconds("backoff base", value, 0.001, YEAR)


def _cap(backoff: Backoff, _: object, value: object) -> None:
    checks.seconds("backoff cap", value, checks.seconds("backoff base", backoff.base, 0.001, YEAR), YEAR)


@t.final
@attrs.frozen
class Backoff:
    """The curve of retries. It cannot be subclassed: nothing that it does may fail where a run is settled.

    Args:
        base: Delay of the first failure, in seconds or as a timedelta, at least 1 ms. Default: 1.
        cap: The longest delay, from ``base`` to 365 days. Default: 3600.

    Raises:
        ConfigError: A value is out of its bounds.
    """

    base: float | dt.timedelta = attrs.field(default=1.0, validator=_base)
    cap: float | dt.timedelta = attrs.field(default=3600.0, validator=_cap)

    def __init_subclass__(cls) -> None:
        raise TypeError("venturi.Backoff cannot be subclassed")

    def nanoseconds(self, failure: int) -> int:
        """The delay before jitter of the failure with that number, counted from 1."""
        base, cap = _nanoseconds(self.base), _nanoseconds(self.cap)
        here, following = 1, 1
        for _ in range(failure - 1):
            if base * here >= cap:
                break
            here, following = following, here + following
        return min(base * here, cap)


def jittered(backoff: Backoff, job: uuid.UUID, failure: int, jitter: float) -> int:
    """The delay of a retry, in nanoseconds.

    Args:
        backoff: The curve.
        job: The job's id.
        failure: The job's new failure_count, from 1.
        jitter: The largest share of the delay to take off, from 0 (none) to 1.
    """
    delay = backoff.nanoseconds(failure)
    high, low = job.int >> 64, job.int & _MASK
    drawn = _splitmix(high ^ _splitmix(low ^ (failure & _MASK)))
    return int(delay * (1.0 - jitter * (1.0 - (drawn >> 11) / (1 << 53))))


def _splitmix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _nanoseconds(value: float | dt.timedelta) -> int:
    if isinstance(value, dt.timedelta):
        return checks.microseconds(value) * 1000
    return round(value * 1_000_000_000)
