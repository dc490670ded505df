"""Typed values as JSON text for a jsonb column, and back.

The promise: a value comes back equal and of the same type, or `encode` refuses it with the path, before any SQL.

**Types.** attrs classes (private, generic and recursive ones too), dataclasses, None, bool, int, float, str, bytes,
datetime, date, time, timedelta, UUID, Decimal, Path, enums, Literal, list, tuple, set, frozenset, dict, Optional, Union,
NewType and Annotated. Sequence stands for list, Mapping for dict, Set for set. An enum is stored by its value, which must
be plain JSON. A dict's keys may be of any type that is stored as a string, or ints. Any and object, and what has no
annotation, hold plain JSON only: None, bool, int, float, str, lists and dicts with str keys.

**Strict.** The type must be exactly the one annotated: 1 is no str, no bool and no float, a tuple is no list, a subclass is
not its base. Three numbers need care, for jsonb stores decimal numbers: a float comes back as a float although jsonb prints
1e22 as an integer, and -0.0 is stored as a string; in a plain JSON field a float of 1e16 and more is refused, since it would
come back as an int, and a zero loses its sign.

**Time.** A datetime must be aware. A zone of `zoneinfo` comes back as that zone, the repeated hour included; any other
time zone comes back as the fixed offset it had.

**Unions.** Stored data is read as the first member that fits: classes with the most fields first, str last. A value that
would come back as another member is refused.

**Rolling deploys.** Unknown fields are ignored; an absent field with a default gets it; an absent field without one is an
error that names it. A field is stored under its attribute's name, whatever its alias. Fields with ``init=False`` are not
stored: the class makes them anew, and `encode` checks that they come out equal.

**Types of your own.** Register both directions on `converter` before the type's first use; the type needs an ``__eq__``::

    venturi.codec.converter.register_unstructure_hook(Money, str)
    venturi.codec.converter.register_structure_hook(Money, lambda data, _: Money.parse(data))

Bounds: 100 levels of nesting, 16 MiB of JSON text, 600 digits of an int.
"""

from __future__ import annotations

import json
import typing as t

from typing_extensions import TypeVar

from venturi._forms import Refused, converter, form, said
from venturi.errors import ConfigError, PayloadError

__all__ = ["MAX_BYTES", "MAX_DEPTH", "converter", "decode", "encode", "plain"]

T = TypeVar("T")

MAX_DEPTH = 100
"""Levels of nested arrays and objects; few enough for the recursion limit of every Python."""

MAX_BYTES = 16 * 1024 * 1024
"""Bytes of JSON text."""

# ASCII only, so that the text passes through a connection of any client encoding.
_write = json.JSONEncoder(check_circular=False, allow_nan=False, separators=(",", ":")).encode
_read = json.JSONDecoder().decode


def encode(value: object, type_: t.Any) -> str:
    """The JSON text of a value.

    Args:
        value: What to store.
        type_: What it is: a class or any annotation of the types above.

    Raises:
        PayloadError: It cannot be stored, or would not come back equal and of the same type.
        ConfigError: An annotation does not resolve.
    """
    try:
        data = form(type_).dump(value)
        text = _write(data)
        _check_depth(text, data)
    except Exception as error:
        raise _payload_error(error) from _cause(error)
    if len(text) > MAX_BYTES:
        raise PayloadError(f"{len(text)} bytes of JSON; at most {MAX_BYTES} can be stored")
    return text


def decode(text: str, type_: type[T]) -> T:
    """The value that `encode` made the text of.

    Args:
        text: JSON, as the jsonb column prints it.
        type_: What to read it as.

    Raises:
        PayloadError: The text does not fit the type, or the class refused the values, with its exception as the cause.
        ConfigError: An annotation does not resolve.
    """
    try:
        data = _read(text)
        _check_depth(text, data)
        return t.cast(T, form(type_).load(data))
    except Exception as error:
        raise _payload_error(error) from _cause(error)


def plain(value: object) -> str:
    """The JSON text of plain JSON data, like evidence for the journal.

    Raises:
        PayloadError: Some part of it is no plain JSON, or would not come back equal and of the same type.
    """
    return encode(value, t.Any)


def _check_depth(text: str, data: object) -> None:
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(data) > MAX_DEPTH:
        raise RecursionError


def _depth(data: t.Any) -> int:
    depth, level = 0, [data]
    while level := [value for value in level if isinstance(value, (dict, list))]:
        level = [inner for value in level for inner in (value.values() if isinstance(value, dict) else value)]
        depth += 1
    return depth


def _payload_error(error: Exception) -> Exception:
    if isinstance(error, ConfigError):
        return error
    if isinstance(error, Refused):
        return PayloadError(error.problem, path=error.route)
    if isinstance(error, RecursionError):
        return PayloadError(f"nested deeper than {MAX_DEPTH} levels, or holds itself")
    return PayloadError(said(error))


def _cause(error: Exception) -> BaseException | None:
    return error.__cause__ if isinstance(error, (ConfigError, Refused)) else error
