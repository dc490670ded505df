"""What the arguments of commands may be; argparse turns an error here into wrong usage."""

from __future__ import annotations

import argparse
import datetime as dt
import re
import uuid

from venturi import checks
from venturi.errors import ConfigError

__all__ = ["count", "duration", "identifier", "kind", "moment", "optional_whole", "page"]

_UNITS = {"": "seconds", "ms": "milliseconds", "s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def duration(text: str) -> dt.timedelta:
    """A span of time: a number of seconds, or one with the unit ms, s, m, h or d."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|)", text)
    try:
        if match is not None:
            return dt.timedelta(**{_UNITS[match[2]]: float(match[1])})
    except OverflowError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is no span of time like 90, 1.5s, 10m, 2h or 30d")


def moment(text: str) -> dt.datetime | dt.timedelta:
    """A time: an ISO date and time with its zone, or how long ago it was, with a unit: 2024 may be meant as a year."""
    try:
        instant = dt.datetime.fromisoformat(text)
    except ValueError:
        if text[-1:].isalpha() or text == "0":
            return duration(text)
        raise argparse.ArgumentTypeError(f"{text!r} is no time like 30d (days ago) or 2026-01-31T00:00Z") from None
    if instant.utcoffset() is None:
        raise argparse.ArgumentTypeError(f"{text!r} has no time zone, as in 2026-01-31T00:00Z")
    return instant


def identifier(text: str) -> uuid.UUID:
    """The id of a job."""
    try:
        return uuid.UUID(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no job's id") from None


def count(text: str) -> int:
    """A whole number from 1."""
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")


def page(text: str) -> int:
    """How many jobs to ask for at once."""
    if (number := count(text)) <= 1000:
        return number
    raise argparse.ArgumentTypeError(f"{text!r} is more than 1000")


def kind(text: str) -> str:
    """A kind of tasks."""
    try:
        return checks.kind("kind", text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def optional_whole(text: str) -> int | None:
    """A whole number, or ``none``."""
    if text == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor none") from None
