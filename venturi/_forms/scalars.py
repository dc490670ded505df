"""How single values are stored as plain JSON: numbers, text, times, bytes, ids; and how a refusal finds its path."""

from __future__ import annotations

import base64
import collections.abc as abc
import datetime as dt
import decimal
import math
import pathlib
import typing as t
import uuid
import zoneinfo

import attrs

from venturi.errors import PayloadError

__all__ = ["SCALARS", "Convert", "Form", "Refused", "check", "kind_of", "name", "unchanged", "write_float"]

Convert: t.TypeAlias = abc.Callable[[t.Any], t.Any]

_LARGEST_INT = 10**600  # an interpreter can be told to read no more than 640 digits


class Refused(PayloadError):
    """A `PayloadError` on its way out, which gathers the steps of its path, innermost first."""

    def __init__(self, problem: str, *steps: str) -> None:
        super().__init__(problem)
        self.steps = list(steps)

    @property
    def route(self) -> str:
        return "$" + "".join(reversed(self.steps))


@attrs.frozen
class Form:
    """How one type is stored.

    Attributes:
        dump: From a value to plain JSON data, just as jsonb would give it back.
        load: From such data to the value.
    """

    dump: Convert
    load: Convert


def kind_of(value: object) -> t.Any:
    """The exact type, unknown to type checkers."""
    return type(value)


def check(value: object, kind: type, expected: object) -> None:
    """Refuse a value that is not exactly of that kind, saying what was expected."""
    if type(value) is not kind:
        raise Refused(f"expected {name(expected)}, got {name(type(value))}")


def name(type_: object) -> str:
    """A type as a message shows it."""
    return type_.__qualname__ if isinstance(type_, type) else str(type_)


def _scalar(cls: type, json_type: type, write: Convert, read: Convert) -> Form:
    def dump(value: t.Any) -> t.Any:
        check(value, cls, cls)
        return write(value)

    def load(data: t.Any) -> t.Any:
        check(data, json_type, cls)
        try:
            return read(data)
        except (ValueError, ArithmeticError, LookupError, OSError) as error:
            raise Refused(f"not a valid {name(cls)}") from error

    return Form(dump, load)


def unchanged(value: t.Any) -> t.Any:
    """The value itself, which is JSON already."""
    return value


def _text(value: str) -> str:
    if "\0" in value:
        raise Refused("holds a NUL character, which PostgreSQL cannot store")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise Refused("holds a lone surrogate, which PostgreSQL cannot store")
    return value


def _whole(value: int) -> int:
    if not -_LARGEST_INT < value < _LARGEST_INT:
        raise Refused("an int of more than 600 digits")
    return value


def write_float(value: float) -> float | int | str:
    """A float as jsonb gives it back: a large one as an integer; the sign of a zero is kept in a string."""
    if not math.isfinite(value):
        raise Refused(f"{value} is no JSON number")
    if abs(value) >= 1e16:
        return int(decimal.Decimal(repr(value)))
    return "-0.0" if value == 0 and math.copysign(1, value) < 0 else value


def _dump_float(value: t.Any) -> float | int | str:
    check(value, float, float)
    return write_float(value)


def _load_float(data: t.Any) -> float:
    if data == "-0.0":
        return -0.0
    if type(data) is float and math.isfinite(data):
        return data
    check(data, int, float)
    try:
        value = float(data)
    except OverflowError as error:
        raise Refused("too large for a float") from error
    if value != data and write_float(value) != data:
        raise Refused("an integer that no float equals")
    return value


def _write_decimal(value: decimal.Decimal) -> str:
    if not value.is_finite():
        raise Refused(f"{value} is no number")
    return str(value)


def _read_decimal(text: str) -> decimal.Decimal:
    value = decimal.Decimal(text)
    if not value.is_finite():
        raise ValueError(text)
    return value


def _write_datetime(value: dt.datetime) -> str:
    if value.utcoffset() is None:
        raise Refused("a naive datetime names no instant; give it a time zone")
    text = value.isoformat()
    if isinstance(value.tzinfo, zoneinfo.ZoneInfo) and value.tzinfo.key:
        text = f"{text}[{value.tzinfo.key}]"
    if _read_datetime(text) != value:
        raise Refused("a repeated or skipped hour of a time zone that cannot be stored; convert it to UTC")
    return text


def _read_datetime(text: str) -> dt.datetime:
    stamp, bracket, key = text.partition("[")
    value = dt.datetime.fromisoformat(stamp)
    if value.tzinfo is None:
        raise ValueError("no time zone")
    if not bracket:
        return value
    zone = zoneinfo.ZoneInfo(key.removesuffix("]"))
    for fold in (0, 1):
        local = value.replace(tzinfo=zone, fold=fold)
        if local.utcoffset() == value.utcoffset():
            return local
    return value.astimezone(zone)  # the zone's rules have changed since; the instant stands


def _write_time(value: dt.time) -> str:
    if value.tzinfo is not None and value.utcoffset() is None:
        raise Refused("a time of day in a zone without a fixed offset")
    return value.isoformat()


def _write_timedelta(value: dt.timedelta) -> int:
    return value // dt.timedelta(microseconds=1)


def _read_timedelta(microseconds: int) -> dt.timedelta:
    return dt.timedelta(microseconds=microseconds)


def _write_bytes(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _read_bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _write_path(value: pathlib.Path) -> str:
    return _text(str(value))


SCALARS: dict[object, Form] = {
    type(None): _scalar(type(None), type(None), unchanged, unchanged),
    bool: _scalar(bool, bool, unchanged, unchanged),
    int: _scalar(int, int, _whole, unchanged),
    float: Form(_dump_float, _load_float),
    str: _scalar(str, str, _text, unchanged),
    bytes: _scalar(bytes, str, _write_bytes, _read_bytes),
    dt.datetime: _scalar(dt.datetime, str, _write_datetime, _read_datetime),
    dt.date: _scalar(dt.date, str, dt.date.isoformat, dt.date.fromisoformat),
    dt.time: _scalar(dt.time, str, _write_time, dt.time.fromisoformat),
    dt.timedelta: _scalar(dt.timedelta, int, _write_timedelta, _read_timedelta),
    uuid.UUID: _scalar(uuid.UUID, str, str, uuid.UUID),
    decimal.Decimal: _scalar(decimal.Decimal, str, _write_decimal, _read_decimal),
    pathlib.Path: _scalar(type(pathlib.Path()), str, _write_path, pathlib.Path),
}
