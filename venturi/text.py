"""Text that is written beside a job: always storable, always bounded, whatever the user's code produced."""

from __future__ import annotations

import re
import traceback

import psycopg

__all__ = ["describe", "note", "trace"]

NOTE_BYTES = 8 * 1024
TRACEBACK_BYTES = 16 * 1024

_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_MARK = " [...] "


def note(value: object) -> str:
    """The text with what PostgreSQL cannot store made visible, cut in its middle to 8 KiB of UTF-8."""
    text = _render(value)
    # Text far over the bound is cut before it is looked at: it may be hundreds of megabytes.
    if len(text) > 2 * NOTE_BYTES:
        text = text[:NOTE_BYTES] + _MARK + text[-NOTE_BYTES:]
    data = _storable(text).encode()
    if len(data) <= NOTE_BYTES:
        return data.decode()
    half = (NOTE_BYTES - len(_MARK)) // 2
    return data[:half].decode(errors="ignore") + _MARK + data[-half:].decode(errors="ignore")


def describe(error: BaseException) -> str:
    """The error in one line: ``TypeName: text``, or the type name alone when it has no text."""
    text = _render(error)
    name = _name(error)
    return note(f"{name}: {text}" if text else name)


def trace(error: BaseException) -> str:
    """The traceback with its causes, the last 16 KiB of it."""
    try:
        lines = traceback.format_exception(type(error), error, error.__traceback__, limit=-50)
    except BaseException as problem:  # noqa: BLE001 - a user's __str__, __repr__ or __notes__ may raise anything
        lines = [f"{_name(error)}: its traceback cannot be rendered: {_name(problem)}"]
    tail = "".join(lines)[-TRACEBACK_BYTES:]
    return _storable(tail).encode()[-TRACEBACK_BYTES:].decode(errors="ignore")


def _render(value: object) -> str:
    try:
        if isinstance(value, psycopg.Error) and value.diag.message_primary is not None:
            # The server's DETAIL repeats values of rows: it is left to the traceback, for those who look for it.
            return value.diag.message_primary
        # Of str itself: a subclass, which __str__ may give too, has its own idea of slices and lengths.
        return str.__str__(value if isinstance(value, str) else str(value))
    except BaseException as problem:  # noqa: BLE001 - a user's __str__ may raise anything
        return f"<text of {_name(value)} cannot be rendered: {_name(problem)}>"


def _name(value: object) -> str:
    try:
        return str.__str__(type(value).__name__)
    except BaseException:  # noqa: BLE001 - a user's metaclass may raise anything
        return "a nameless class"


def _storable(text: str) -> str:
    return _UNSTORABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
