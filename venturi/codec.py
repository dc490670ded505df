"""Typed values as JSON text for a jsonb column, and back.

The promise: a value comes back equal and of the same type, or `encode` refuses it, naming the path, before any SQL.

**Types.** attrs classes (private, generic and recursive ones too), dataclasses, None, bool, int, float, str, bytes,
datetime, date, time, timedelta, UUID, Decimal, Path, enums, Literal, list, tuple, set, frozenset, dict, Optional,
Union, NewType and Annotated. Sequence stands for list, Mapping for dict, Set for set. An enum is stored by its value,
which must be plain JSON. The keys of a dict are of any type that is stored as an int or as a string. Any, object and a
field without annotation hold plain JSON only: None, bool, int, float, str, lists, and dicts with str keys.

**Strict.** The type must be exactly the annotated one: 1 is no str, no bool and no float, a tuple is no list, a
subclass is not its base. Floats need care, for jsonb keeps decimal numbers: 1e22 comes back as a float although
jsonb prints an integer, and -0.0 is stored as a string. Where Any hides the type, a float of 1e16 or more would come
back as an int and is refused, and a zero loses its sign.

**Time.** A datetime must be aware. A zone of `zoneinfo` comes back as that zone, the repeated hour included; any
other time zone comes back as the fixed offset it had. A time of day loses its fold.

**Unions.** Data is read as the first member that takes it, in an order that is not that of the annotation: the class
with the most fields without a default first, then those with fewer, then other types, float and str last. A value
that would come back as another member is refused; a Literal field with a value of its own in each class tells them
apart.

**Rolling deploys.** Unknown fields are ignored; an absent field with a default gets it; an absent field without one is
an error that names it. A field is stored under its attribute's name, whatever its alias. A field with ``init=False``
is not stored: the class makes it anew, and `encode` checks that it comes out equal.

**Types of your own.** Register both directions on `converter` before the first use; the type needs an ``__eq__``::

    venturi.codec.converter.register_unstructure_hook(Money, str)
    venturi.codec.converter.register_structure_hook(Money, lambda data, _: Money.parse(data))

Bounds: 100 levels of nesting, 16 MiB of JSON text, 600 digits of an int.
"""

from __future__ import annotations

import json
import typing as t
from contextlib import suppress

from typing_extensions import TypeVar

from venturi._forms import Refused, converter, form
from venturi.errors import ConfigError, PayloadError
from venturi.text import describe

__all__ = ["MAX_BYTES", "MAX_DEPTH", "converter", "decode", "encode", "parse", "plain"]

T = TypeVar("T")

MAX_DEPTH = 100
"""Levels of nested arrays and objects; few enough for the recursion limit of every Python."""

MAX_BYTES = 16 * 1024 * 1024
"""Bytes of JSON text."""

# ASCII only, so that the text passes through a connection of any client encoding.
_write = json.JSONEncoder(check_circular=False, allow_nan=False, separators=(",", ":")).encode
_read = json.JSONDecoder().decode
_begin = json.JSONDecoder().raw_decode

_CONTAINERS: t.Final[tuple[type[t.Any], ...]] = (dict, list)


def encode(value: object, type_: t.Any) -> str:
    """The JSON text of a value.

    Args:
        value: What to store.
        type_: What it is: any annotation of the types above.

    Raises:
        PayloadError: It cannot be stored, or would not come back equal and of the same type.
        ConfigError: An annotation does not resolve.
    """
    try:
        data = form(type_).dump(value)
        text = _write(data)
        _check_depth(text, data)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - hooks and classes of the user may raise anything
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
        PayloadError: The text does not fit the type, or the class refused the values; then its exception is the cause.
        ConfigError: An annotation does not resolve.
    """
    try:
        return t.cast("T", form(type_).load(parse(text)))
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - hooks and classes of the user may raise anything
        raise _payload_error(error) from _cause(error)


def parse(text: str) -> t.Any:
    """The plain JSON data of a text, whatever type it was made of.

    Raises:
        RecursionError: It is nested deeper than 100 levels, on every Python.
        ValueError: An int in it has more digits than this interpreter reads, 4300 by default.
    """
    data: t.Any = None
    end = -1
    with suppress(ValueError):
        data, end = _begin(text)
    if end != len(text):
        data = _read(text)  # with space around it, which a jsonb column does not print, or no JSON
    _check_depth(text, data)
    return data


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
    while containers := [value for value in level if value.__class__ in _CONTAINERS]:
        level = [inner for value in containers for inner in (value if value.__class__ is list else value.values())]
        depth += 1
    return depth


def _payload_error(error: Exception) -> PayloadError:
    if isinstance(error, Refused):
        return PayloadError(error.problem, path=error.route)
    if isinstance(error, RecursionError):
        return PayloadError(f"nested deeper than {MAX_DEPTH} levels, or holds itself")
    return PayloadError(describe(error))


def _cause(error: Exception) -> BaseException | None:
    return error.__cause__ if isinstance(error, Refused) else error
