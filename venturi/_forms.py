"""How each type is stored: for every type a pair of functions, made once, that convert and check in one pass.

What such a pair stores comes back equal by construction. Where code of the user has a say (hooks, and classes with
converters, validators or an ``__init__`` of their own) and where union members could be mixed up, the value is read back
at once and compared.
"""

from __future__ import annotations

import base64
import collections.abc as abc
import dataclasses
import datetime as dt
import decimal
import enum
import functools
import math
import pathlib
import traceback
import types
import typing as t
import uuid
import zoneinfo

import attrs
import cattrs
from typing_extensions import TypeAliasType

from venturi.errors import ConfigError, PayloadError

__all__ = ["Form", "Refused", "converter", "form", "said"]

Convert: t.TypeAlias = abc.Callable[[t.Any], t.Any]

_LARGEST_INT = 10**600  # an interpreter can be told to read no more than 640 digits
_FIRST_WHOLE = 1e16  # from here on every float is whole, and jsonb prints it as an integer

_CONTAINERS: dict[object, type] = {
    list: list,
    abc.Sequence: list,
    abc.MutableSequence: list,
    tuple: tuple,
    set: set,
    abc.Set: set,
    abc.MutableSet: set,
    frozenset: frozenset,
    dict: dict,
    abc.Mapping: dict,
    abc.MutableMapping: dict,
}


class Refused(PayloadError):
    """A `PayloadError` on its way out, which gathers the steps of its path innermost first."""

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


def said(error: BaseException) -> str:
    """Type and text of an exception, of one that cannot be printed too."""
    return "".join(traceback.format_exception_only(error)).strip()


def _mismatch(expected: object, value: object) -> Refused:
    return Refused(f"expected {_name(expected)}, got {_name(type(value))}")


def _name(type_: object) -> str:
    return type_.__qualname__ if isinstance(type_, type) else str(type_)


# Scalars


def _scalar(cls: type, json_type: type, write: Convert, read: Convert) -> Form:
    def dump(value: t.Any) -> t.Any:
        if type(value) is not cls:
            raise _mismatch(cls, value)
        return write(value)

    def load(data: t.Any) -> t.Any:
        if type(data) is not json_type:
            raise _mismatch(cls, data)
        try:
            return read(data)
        except (ValueError, ArithmeticError, LookupError, OSError) as error:
            raise Refused(f"not a valid {_name(cls)}") from error

    return Form(dump, load)


def _same_object(value: t.Any) -> t.Any:
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


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise Refused(f"{value} is no JSON number")
    return value


def _write_float(value: float) -> float | int | str:
    if abs(_finite(value)) >= _FIRST_WHOLE:
        return int(decimal.Decimal(repr(value)))
    return "-0.0" if value == 0 and math.copysign(1, value) < 0 else value


def _dump_float(value: t.Any) -> float | int | str:
    if type(value) is not float:
        raise _mismatch(float, value)
    return _write_float(value)


def _load_float(data: t.Any) -> float:
    if type(data) is float:
        return _finite(data)
    if data == "-0.0":
        return -0.0
    if type(data) is not int:
        raise _mismatch(float, data)
    try:
        value = float(data)
    except OverflowError as error:
        raise Refused("too large for a float") from error
    if value != data and _write_float(value) != data:
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
        return f"{text}[{value.tzinfo.key}]"
    if dt.datetime.fromisoformat(text) != value:
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
    text = value.isoformat()
    back = dt.time.fromisoformat(text)
    if back != value or back.fold != value.fold or (back.tzinfo is None) != (value.tzinfo is None):
        raise Refused("a time whose zone or fold cannot be stored")
    return text


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


_SCALARS: dict[object, Form] = {
    type(None): _scalar(type(None), type(None), _same_object, _same_object),
    bool: _scalar(bool, bool, _same_object, _same_object),
    int: _scalar(int, int, _whole, _same_object),
    float: Form(_dump_float, _load_float),
    str: _scalar(str, str, _text, _same_object),
    bytes: _scalar(bytes, str, _write_bytes, _read_bytes),
    dt.datetime: _scalar(dt.datetime, str, _write_datetime, _read_datetime),
    dt.date: _scalar(dt.date, str, dt.date.isoformat, dt.date.fromisoformat),
    dt.time: _scalar(dt.time, str, _write_time, dt.time.fromisoformat),
    dt.timedelta: _scalar(dt.timedelta, int, _write_timedelta, _read_timedelta),
    uuid.UUID: _scalar(uuid.UUID, str, str, uuid.UUID),
    decimal.Decimal: _scalar(decimal.Decimal, str, _write_decimal, _read_decimal),
    pathlib.Path: _scalar(type(pathlib.Path()), str, _write_path, pathlib.Path),
}


def _enum(cls: type[enum.Enum]) -> Form:
    def dump(member: t.Any) -> t.Any:
        if type(member) is not cls:
            raise _mismatch(cls, member)
        return _dump_plain(member.value)

    def load(data: t.Any) -> enum.Enum:
        try:
            member = cls(data)
        except Exception as error:
            raise Refused(f"no value of {_name(cls)}") from error
        if type(member.value) is not type(data):
            raise _mismatch(cls, data)
        return member

    return Form(dump, load)


def _literal(choices: tuple[object, ...]) -> Form:
    stored = [(form(type(choice)).dump(choice), choice) for choice in choices]

    def dump(value: t.Any) -> t.Any:
        for data, choice in stored:
            if type(choice) is type(value) and choice == value:
                return data
        raise Refused("none of the literals allowed here")

    def load(data: t.Any) -> t.Any:
        for known, choice in stored:
            if type(known) is type(data) and known == data:
                return choice
        raise Refused("none of the literals allowed here")

    return Form(dump, load)


# Containers


def _each(convert: Convert, values: abc.Iterable[t.Any]) -> list[t.Any]:
    done: list[t.Any] = []
    try:
        for value in values:
            done.append(convert(value))  # noqa: PERF401
    except Refused as refused:
        refused.steps.append(f"[{len(done)}]")
        raise
    return done


def _items(convert_key: Convert, convert: Convert, values: dict[t.Any, t.Any]) -> dict[t.Any, t.Any]:
    done: dict[t.Any, t.Any] = {}
    key = None
    try:
        for key, value in values.items():
            done[convert_key(key)] = convert(value)
    except Refused as refused:
        refused.steps.append(_step(key))
        raise
    if len(done) != len(values):
        raise Refused("two keys are the same when stored")
    return done


def _step(key: object) -> str:
    if isinstance(key, str) and key.isidentifier():
        return f".{key[:60]}"
    return f"[{ascii(key)[:60]}]" if isinstance(key, (str, int)) else f"[{_name(type(key))}]"


def _collection(cls: type, item: Form) -> Form:
    def dump(values: t.Any) -> list[t.Any]:
        if type(values) is not cls:
            raise _mismatch(cls, values)
        done = _each(item.dump, values)
        # Equal sets are stored alike.
        return sorted(done, key=repr) if cls in (set, frozenset) else done

    def load(data: t.Any) -> t.Any:
        if type(data) is not list:
            raise _mismatch(cls, data)
        return cls(_each(item.load, data))

    return Form(dump, load)


def _fixed_tuple(items: list[Form]) -> Form:
    def convert(values: abc.Sequence[t.Any], directions: list[Convert]) -> list[t.Any]:
        if len(values) != len(directions):
            raise Refused(f"expected {len(directions)} items, got {len(values)}")
        following = iter(directions)
        return _each(lambda value: next(following)(value), values)

    def dump(values: t.Any) -> list[t.Any]:
        if type(values) is not tuple:
            raise _mismatch(tuple, values)
        return convert(values, [item.dump for item in items])

    def load(data: t.Any) -> tuple[t.Any, ...]:
        if type(data) is not list:
            raise _mismatch(tuple, data)
        return tuple(convert(data, [item.load for item in items]))

    return Form(dump, load)


def _mapping(key_type: t.Any, item: Form) -> Form:
    key, numeric = form(key_type), _is_numeric(key_type)

    def dump_key(value: t.Any) -> str:
        data = key.dump(value)
        if type(data) is not str and not (numeric and type(data) is int):
            raise Refused(f"a key of type {_name(type(value))} cannot be stored")
        return str(data)

    def load_key(text: str) -> t.Any:
        if not numeric:
            return key.load(text)
        if not text.removeprefix("-").isdecimal() or str(int(text)) != text:
            raise Refused("a key that is no int")
        return key.load(int(text))

    def dump(values: t.Any) -> dict[str, t.Any]:
        if type(values) is not dict:
            raise _mismatch(dict, values)
        return _items(dump_key, item.dump, t.cast("dict[t.Any, t.Any]", values))

    def load(data: t.Any) -> dict[t.Any, t.Any]:
        if type(data) is not dict:
            raise _mismatch(dict, data)
        return _items(load_key, item.load, t.cast("dict[t.Any, t.Any]", data))

    return Form(dump, load)


def _is_numeric(key_type: t.Any) -> bool:
    while isinstance(key_type, t.NewType):
        key_type = key_type.__supertype__
    if isinstance(key_type, type) and issubclass(key_type, enum.Enum):
        return all(type(member.value) is int for member in key_type)
    return key_type is int


def _dump_plain(value: t.Any) -> t.Any:
    kind = type(value)
    if kind is list:
        return _each(_dump_plain, value)
    if kind is dict:
        return _items(_SCALARS[str].dump, _dump_plain, value)
    if kind is float and abs(_finite(value)) >= _FIRST_WHOLE:
        raise Refused("a float so large would come back as an int; annotate it as float")
    if kind not in (str, int, float, bool, types.NoneType):
        raise Refused(f"{_name(kind)} is no plain JSON")
    return value if kind is float else _SCALARS[kind].dump(value)


# Unions and classes


def _union(members: tuple[t.Any, ...]) -> Form:
    # The order is that of the types, not of the annotation: A | B == B | A, so both must read alike.
    concrete = sorted((m for m in members if m is not types.NoneType), key=_breadth)
    forms = [form(member) for member in concrete]
    inner = forms[0] if len(forms) == 1 else _verified(_first_of(forms))

    def dump(value: t.Any) -> t.Any:
        return None if value is None else inner.dump(value)

    def load(data: t.Any) -> t.Any:
        return None if data is None else inner.load(data)

    return Form(dump, load) if types.NoneType in members else inner


def _breadth(member: t.Any) -> tuple[bool, int, str]:
    cls = t.get_origin(member) or member
    return member is str, -len(_fields(cls)) if _is_record(cls) else 0, str(member)


def _first_of(forms: list[Form]) -> Form:
    def first(converts: list[Convert], value: t.Any) -> t.Any:
        refusals: list[Refused] = []
        for convert in converts:
            try:
                return convert(value)
            except Refused as refused:
                refusals.append(refused)
        deepest = max(refusals, key=lambda refused: len(refused.steps))
        raise deepest if deepest.steps else Refused(" and ".join(dict.fromkeys(r.problem for r in refusals)))

    dumps, loads = [form.dump for form in forms], [form.load for form in forms]
    return Form(functools.partial(first, dumps), functools.partial(first, loads))


def _verified(unsure: Form) -> Form:
    def dump(value: t.Any) -> t.Any:
        data = unsure.dump(value)
        try:
            back = unsure.load(data)
        except Refused as refused:
            raise Refused(f"could not be read back: {refused.problem}", *refused.steps) from refused.__cause__
        if not _same(back, value):
            raise Refused(f"would not come back as it is, but as {_name(type(back))}")
        return data

    return Form(dump, unsure.load)


def _same(one: t.Any, other: t.Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if _is_record(type(one)):
        names = [field.name for field in _fields(type(one)) if getattr(field, "eq", True) and _compares(field)]
        return all(_same(getattr(one, name), getattr(other, name)) for name in names)
    return bool(one == other)
