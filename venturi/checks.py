"""Checks of options and arguments: what is wrong is said with name, value and bound, and nothing is clamped."""

from __future__ import annotations

import datetime as dt
import math
import typing as t
import unicodedata

from venturi.errors import ConfigError
from venturi.values import Priority

__all__ = [
    "delay",
    "flag",
    "fraction",
    "instance",
    "instant",
    "kind",
    "microseconds",
    "priority",
    "schema",
    "seconds",
    "whole",
]

KIND_BYTES = 200

T = t.TypeVar("T")


def seconds(option: str, value: object, low: float, high: float = math.inf, *, above: bool = False) -> float:
    """The value of a time option in seconds.

    Args:
        option: Its name, for the message.
        value: Seconds as an int or float, or a timedelta.
        low: The least value allowed, in seconds; with ``above`` the value must be larger.
        high: The largest value allowed, in seconds.

    Raises:
        ConfigError: It is of another type, not a finite number, or out of bounds.
    """
    if isinstance(value, dt.timedelta):
        number = value.total_seconds()
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value) if abs(value) < 1e300 else math.inf
    else:
        raise ConfigError(f"{option}={value!r}: must be a number of seconds or a timedelta")
    if not (low < number if above else low <= number) or not number <= high or math.isinf(number):
        bound = f"above {low:g} s" if above else f"at least {low:g} s"
        limit = "" if math.isinf(high) else f" and at most {high:g} s"
        raise ConfigError(f"{option}={value!r}: must be {bound}{limit}")
    return number


def whole(option: str, value: object, low: int, high: int | None = None) -> int:
    """The value of an option that counts something.

    Raises:
        ConfigError: It is no int (a bool is none) or out of bounds.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{option}={value!r}: must be a whole number")
    if value < low or (high is not None and value > high):
        limit = "" if high is None else f" and at most {high}"
        raise ConfigError(f"{option}={value!r}: must be at least {low}{limit}")
    return int(value)


def fraction(option: str, value: object) -> float:
    """The value of an option between 0 and 1, both included.

    Raises:
        ConfigError: It is no number or out of bounds.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ConfigError(f"{option}={value!r}: must be a number from 0 to 1")
    return float(value)


def flag(option: str, value: object) -> bool:
    """The value of an option that is on or off.

    Raises:
        ConfigError: It is no bool.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{option}={value!r}: must be True or False")
    return value


def instance(option: str, value: object, cls: type[T]) -> T:
    """The value of an option that takes an object.

    Raises:
        ConfigError: It is of another class.
    """
    if not isinstance(value, cls):
        raise ConfigError(f"{option}={value!r}: must be a {cls.__qualname__}")
    return value


def instant(option: str, value: object) -> dt.datetime:
    """A point in time, in UTC: arithmetic in a zone with a repeated hour would take the wrong one of the two.

    Raises:
        TypeError: It is no datetime.
        ConfigError: It is a datetime without a time zone.
    """
    if not isinstance(value, dt.datetime):
        raise TypeError(f"{option} must be a datetime, not {type(value).__name__}")
    if value.utcoffset() is None:
        raise ConfigError(f"{option}={value!r}: must have a time zone; a naive datetime names no instant")
    try:
        return value.astimezone(dt.UTC)
    except OverflowError:
        end = dt.datetime.max if value.year == dt.MAXYEAR else dt.datetime.min
        return end.replace(tzinfo=dt.UTC)


def delay(option: str, value: object) -> dt.timedelta:
    """A span of time to wait, as a plain timedelta.

    Raises:
        TypeError: It is no timedelta.
    """
    if not isinstance(value, dt.timedelta):
        raise TypeError(f"{option} must be a timedelta, not {type(value).__name__}")
    return dt.timedelta(microseconds=microseconds(value))


def microseconds(span: dt.timedelta) -> int:
    """The span in whole microseconds, rounded down."""
    # By timedelta's own division: subclasses, those of pendulum for one, divide by their own kind only.
    return dt.timedelta.__floordiv__(span, dt.timedelta(microseconds=1))


def priority(option: str, value: object) -> Priority:
    """A priority, from a member or an int from 0 to 2.

    Raises:
        ConfigError: It is anything else.
    """
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 2:
        return Priority(value)
    names = ", ".join(f"{member.name} {member.value}" for member in Priority)
    raise ConfigError(f"{option}={value!r}: must be one of {names}")


def kind(option: str, value: object) -> str:
    """A kind of tasks: 1 to 200 bytes of UTF-8 without control characters.

    Raises:
        ConfigError: It is anything else.
    """
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{option}={value!r}: must be a text of 1 to {KIND_BYTES} bytes")
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in value):
        raise ConfigError(f"{option}={value!r}: must hold no control characters or lone surrogates")
    if len(value.encode()) > KIND_BYTES:
        raise ConfigError(f"{option}={value[:40]!r}...: must take at most {KIND_BYTES} bytes")
    return value


def schema(name: object) -> str:
    """The name of a queue's schema: 1 to 63 bytes of UTF-8 without NUL, and none that PostgreSQL keeps for itself.

    Raises:
        ConfigError: It is anything else.
    """
    if not isinstance(name, str):
        raise ConfigError(f"schema={name!r}: must be a str")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        size = 0
    if not 1 <= size <= 63 or "\0" in name:
        raise ConfigError(f"schema={name!r}: must be 1 to 63 bytes of UTF-8 without NUL")
    if name.startswith("pg_") or name == "information_schema":
        raise ConfigError(f"schema={name!r}: the names pg_* and information_schema belong to PostgreSQL")
    return name
