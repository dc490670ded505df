"""How values made of others are stored: each function makes the form of the whole from the forms of its parts."""

from __future__ import annotations

import collections.abc as abc
import datetime as dt
import decimal
import enum
import functools
import pathlib
import types
import typing as t
import uuid

from venturi._forms.records import compared, is_record
from venturi._forms.scalars import SCALARS, Convert, Form, Refused, check, kind_of, name, write_float

__all__ = [
    "collection",
    "dump_plain",
    "enumeration",
    "first_of",
    "fixed_tuple",
    "literal",
    "mapping",
    "optional",
    "verified",
]


_TEXTUAL = (str, bytes, dt.datetime, dt.date, dt.time, uuid.UUID, decimal.Decimal, pathlib.Path)
"""What is stored as a string that tells by itself which value it was."""


def enumeration(cls: type[enum.Enum]) -> Form:
    """A member, stored by its value."""

    def dump(member: t.Any) -> t.Any:
        check(member, cls, cls)
        # Not `value`, which a class may define anew; members are looked up by this one.
        return dump_plain(member._value_)

    def load(data: t.Any) -> enum.Enum:
        try:
            member: t.Any = cls(data)
        except Exception as error:
            raise Refused(f"no value of {name(cls)}") from error
        check(data, kind_of(member._value_), cls)
        return t.cast(enum.Enum, member)

    return Form(dump, load)


def literal(stored: list[tuple[t.Any, t.Any]]) -> Form:
    """One of a few values, given as pairs of stored data and value."""

    def find(wanted: t.Any, pairs: list[tuple[t.Any, t.Any]]) -> t.Any:
        for one, other in pairs:
            if type(one) is type(wanted) and one == wanted:
                return other
        raise Refused("none of the literals allowed here")

    dumped = [(value, data) for data, value in stored]
    return Form(lambda value: find(value, dumped), lambda data: find(data, stored))


def collection(cls: type, item: Form) -> Form:
    """A list, set, frozenset or tuple of any length, stored as an array."""

    def dump(values: t.Any) -> list[t.Any]:
        check(values, cls, cls)
        data = _each(item.dump, values)
        # Equal sets are stored alike.
        return sorted(data, key=repr) if cls in (set, frozenset) else data

    def load(data: t.Any) -> t.Any:
        check(data, list, cls)
        return cls(_each(item.load, data))

    return Form(dump, load)


def fixed_tuple(items: list[Form]) -> Form:
    """A tuple of so many items, each with a form of its own, stored as an array."""

    def convert(values: abc.Sequence[t.Any], converts: list[Convert]) -> list[t.Any]:
        if len(values) != len(converts):
            raise Refused(f"expected {len(converts)} items, got {len(values)}")
        following = iter(converts)
        return _each(lambda value: next(following)(value), values)

    def dump(values: t.Any) -> list[t.Any]:
        check(values, tuple, tuple)
        return convert(values, [item.dump for item in items])

    def load(data: t.Any) -> tuple[t.Any, ...]:
        check(data, list, tuple)
        return tuple(convert(data, [item.load for item in items]))

    return Form(dump, load)


def mapping(key: Form, item: Form, *, numeric: bool) -> Form:
    """A dict, stored as an object; ``numeric`` says that its keys are rather ints than strings."""
    keys = _in_text(key, numeric)

    def dump(values: t.Any) -> dict[str, t.Any]:
        check(values, dict, dict)
        return _items(keys.dump, item.dump, values)

    def load(data: t.Any) -> dict[t.Any, t.Any]:
        check(data, dict, dict)
        return _items(keys.load, item.load, data)

    return Form(dump, load)


def _in_text(key: Form, numeric: bool) -> Form:
    """The form of a key that is stored as a string: what was stored as an int in its digits."""

    def dump(value: t.Any) -> str:
        data = key.dump(value)
        if type(data) not in (str, int):
            raise Refused(f"a key of type {name(kind_of(value))} cannot be stored")
        return str(data)

    def load_digits(text: str) -> t.Any:
        if len(text) > 601 or not text.removeprefix("-").isdecimal() or str(int(text)) != text:
            raise Refused("a key that is no int")
        return key.load(int(text))

    if any(key is SCALARS[kind] for kind in _TEXTUAL):
        return key
    if key is SCALARS[int]:
        return Form(dump, load_digits)
    # The string does not tell which of both it was, so what reads it must show that it comes back.
    readings = [Form(dump, key.load), Form(dump, load_digits)]
    return verified(Form(dump, first_of(readings[::-1] if numeric else readings).load))


def dump_plain(value: t.Any) -> t.Any:
    """A copy of plain JSON data, checked."""
    kind = kind_of(value)
    if kind is list:
        return _each(dump_plain, value)
    if kind is dict:
        return _items(SCALARS[str].dump, dump_plain, value)
    if kind is float:
        if isinstance(write_float(value), int):
            raise Refused("a float so large would come back as an int; annotate it as float")
        return value
    if kind not in (str, int, bool, types.NoneType):
        raise Refused(f"{name(kind)} is no plain JSON")
    return SCALARS[kind].dump(value)


def optional(inner: Form) -> Form:
    """None or a value."""

    def dump(value: t.Any) -> t.Any:
        data = None if value is None else inner.dump(value)
        if data is None and value is not None:
            raise Refused("would come back as None")
        return data

    def load(data: t.Any) -> t.Any:
        return None if data is None else inner.load(data)

    return Form(dump, load)


def first_of(forms: list[Form]) -> Form:
    """A value of whichever form takes it first."""

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


def verified(unsure: Form) -> Form:
    """The same form, whose dump reads the data back and refuses what differs."""

    def dump(value: t.Any) -> t.Any:
        data = unsure.dump(value)
        try:
            back = unsure.load(data)
        except Refused as refused:
            raise Refused(f"could not be read back: {refused.problem}", *refused.steps) from refused.__cause__
        if not _same(back, value):
            raise Refused(f"would not come back as it is, but as another {name(kind_of(back))}")
        return data

    return Form(dump, unsure.load)


def _same(one: t.Any, other: t.Any) -> bool:
    kind = kind_of(one)
    if kind is not kind_of(other):
        return False
    if kind in (list, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if kind in (set, frozenset):
        return _typed(one) == _typed(other)
    if kind is dict:
        return _typed(one) == _typed(other) and all(_same(one[key], other[key]) for key in one)
    if is_record(kind):
        return all(_same(getattr(one, field), getattr(other, field)) for field in compared(kind))
    return bool(one == other)


def _typed(values: abc.Iterable[t.Any]) -> set[t.Any]:
    return {(kind_of(value), value) for value in values}


def _each(convert: Convert, values: abc.Iterable[t.Any]) -> list[t.Any]:
    done: list[t.Any] = []
    try:
        for value in values:
            done.append(convert(value))
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
        raise Refused("two keys would be the same")
    return done


def _step(key: object) -> str:
    if isinstance(key, str) and key.isidentifier():
        return f".{key[:60]}"
    return f"[{ascii(key)[:60]}]" if isinstance(key, (str, int)) else f"[{name(kind_of(key))}]"
