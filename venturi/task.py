"""Tasks: frozen typed values with a stable kind and a policy for their enqueue."""

from __future__ import annotations

import datetime as dt
import typing as t
import uuid
from collections.abc import Callable, Iterable

import attrs

from venturi import checks
from venturi.backoff import Backoff
from venturi.errors import ConfigError, PayloadError
from venturi.values import Priority

__all__ = ["TaskType", "dedup_key", "task", "task_type"]

U = t.TypeVar("U")

KEY_BYTES = 1000

_PLAIN = (dict, list, str, int, float, bool)


@attrs.frozen
class TaskType:
    """What venturi knows of a task class.

    Attributes:
        kind: The stable name stored with every job.
        cls: The class itself.
        carry: The type of state kept between runs; None for none.
        backoff: The curve of its retries; None: the worker's.
        timeout: Seconds until a run is told to stop; None: never.
        aliases: Former kinds, still claimed and merged with.
    """

    kind: str
    cls: type
    priority: Priority
    carry: t.Any
    backoff: Backoff | None
    timeout: float | None
    aliases: tuple[str, ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind and its aliases: one kind under several names."""
        return (self.kind, *self.aliases)

    def new_carry(self) -> t.Any:
        """A fresh carry with its default; None for a task without."""
        return None if self.carry is None else (t.get_origin(self.carry) or self.carry)()


@t.dataclass_transform(frozen_default=True, field_specifiers=(attrs.field,))
def task(
    kind: str,
    *,
    priority: Priority = Priority.NORMAL,
    carry: type[t.Any] | None = None,
    backoff: Backoff | None = None,
    timeout: float | dt.timedelta | None = None,
    aliases: Iterable[str] = (),
) -> Callable[[type[U]], type[U]]:
    """Make a class a task: a frozen, slotted attrs class that can be enqueued.

    A class that is an attrs class already is taken as it is. Two methods may set its policy: ``dedup_key(self)``
    returns a str, int or UUID (None: no dedup), ``merge(self, existing)`` decides what becomes of a pending job with
    that key (default: `Replace`). Both run in the thread that enqueues. A field may have either name, and is data then.

    Args:
        kind: The name stored with every job, 1 to 200 bytes; never derived from the class, so that code may move.
        priority: Of jobs whose enqueue names none. Default: NORMAL.
        carry: Type of the state kept between runs: an attrs class or a plain JSON type, made without arguments on a
            first run. Default: None, no state.
        backoff: The curve of retries. Default: None, the worker's.
        timeout: Seconds, or a timedelta, after which a run is told to stop; above 0. Default: None, never.
        aliases: Former kinds of this task: their jobs are run and merged as if they were of this kind.

    Raises:
        ConfigError: An option is out of its bounds, or the carry type or the class cannot be used: ``dedup_key`` or
            ``merge`` is no method, or a field has a mutable default, which all runs of a process would share.
    """
    described = {
        "kind": _kind("kind", kind),
        "priority": checks.priority("priority", priority),
        "carry": _carry(carry),
        "backoff": _backoff(backoff),
        "timeout": None if timeout is None else checks.seconds("timeout", timeout, 0, above=True),
        "aliases": tuple(_kind("alias", alias) for alias in _names(aliases)),
    }

    def wrap(cls: type[U]) -> type[U]:
        if not isinstance(cls, type):  # pyright: ignore[reportUnnecessaryIsInstance] - not all callers are typed
            raise ConfigError(f"@venturi.task({kind!r}) decorates a class, not {cls!r}")
        made = cls if "__attrs_attrs__" in vars(cls) else _frozen(cls)
        _check_policy(made)
        _check_defaults(made)
        made.__venturi_task__ = TaskType(cls=made, **described)  # type: ignore[attr-defined]
        return made

    return wrap


def task_type(cls: type) -> TaskType:
    """What `task` recorded for the class.

    Raises:
        TypeError: The class was not decorated; a subclass of a task is none itself.
    """
    found = vars(cls).get("__venturi_task__")
    if not isinstance(found, TaskType):
        raise TypeError(f"{cls.__qualname__} is no task: decorate it with @venturi.task(kind)")
    return found


def dedup_key(value: object) -> str | None:
    """The task's dedup key as it is stored; None when it has none.

    Raises:
        PayloadError: It is no str, int or UUID, cannot be stored as text, or is over 1000 bytes.
    """
    method = getattr(value, "dedup_key", None)
    key = method() if callable(method) else None
    if key is None:
        return None
    if not isinstance(key, (str, int, uuid.UUID)) or isinstance(key, bool):
        raise PayloadError(f"must be a str, int or UUID, not {type(key).__name__}", path="dedup_key()")
    try:
        text = str(key) if not isinstance(key, str) else str.__str__(key)
    except ValueError as error:
        raise PayloadError("an int of too many digits", path="dedup_key()") from error
    if "\0" in text:
        raise PayloadError("holds a NUL character", path="dedup_key()")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise PayloadError("holds a lone surrogate", path="dedup_key()") from error
    if size > KEY_BYTES:
        raise PayloadError(f"takes {size} bytes, more than {KEY_BYTES}", path="dedup_key()")
    return text


def _kind(option: str, value: object) -> str:
    if isinstance(value, type):
        raise ConfigError(f'@venturi.task needs a kind: write @venturi.task("some.kind") above {value.__qualname__}')
    return checks.kind(option, value)


def _frozen(cls: type[U]) -> type[U]:
    if "__init__" in vars(cls):
        made_by = "@dataclass" if "__dataclass_fields__" in vars(cls) else "its own __init__"
        raise ConfigError(f"{cls.__qualname__}: a task is made an attrs class, which {made_by} stands in the way of")
    try:
        return attrs.frozen(cls)
    except Exception as error:
        raise ConfigError(f"{cls.__qualname__} cannot be made an attrs class, as every task is: {error}") from error


def _check_policy(cls: type) -> None:
    data = {field.name for field in attrs.fields(cls)}
    for name in ("dedup_key", "merge"):
        method = getattr(cls, name, None)
        if name not in data and method is not None and not callable(method):
            raise ConfigError(f"{cls.__qualname__}.{name}: must be a method, not {type(method).__name__}")


def _check_defaults(cls: type) -> None:
    for field in attrs.fields(cls):
        if type(field.default).__hash__ is None:
            kind = type(field.default).__name__
            raise ConfigError(
                f"{cls.__qualname__}.{field.name}: all runs of a process would share this default {kind}; "
                f"write attrs.field(factory={kind}) for a fresh one each time"
            )


def _names(aliases: object) -> tuple[object, ...]:
    if isinstance(aliases, str) or not isinstance(aliases, Iterable):
        raise ConfigError(f"aliases={aliases!r}: must be a sequence of kinds")
    return tuple(t.cast(Iterable[object], aliases))


def _backoff(value: object) -> Backoff | None:
    if value is not None and not isinstance(value, Backoff):
        raise ConfigError(f"backoff={value!r}: must be a venturi.Backoff")
    return value


def _carry(value: t.Any) -> t.Any:
    if value is None:
        return None
    origin = t.get_origin(value) or value
    if not (isinstance(origin, type) and (attrs.has(origin) or origin in _PLAIN)):
        raise ConfigError(f"carry={value!r}: must be an attrs class or a plain JSON type")
    if attrs.has(origin):
        _check_defaults(origin)
    try:
        origin()
    except Exception as error:
        raise ConfigError(f"carry={value!r}: cannot be made without arguments: {error}") from error
    return value
