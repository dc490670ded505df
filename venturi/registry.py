"""Handlers, and the registry that finds the one for a kind."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import typing as t
from collections.abc import Callable, Iterator
from contextlib import suppress

import attrs

from venturi import checks
from venturi.context import Context
from venturi.errors import ConfigError, DuplicateKindError, UnknownKindError
from venturi.outcome import Outcome
from venturi.task import TaskType, task_type

__all__ = ["Bound", "Handler", "Registry"]

T = t.TypeVar("T")


class Handler(t.Generic[T]):
    """A decorated function: still called as before, with its options for the worker beside it.

    Args:
        fn: The function, of ``(task)`` or ``(task, ctx)``.
        task: The task class it handles. Default: None, read from the annotation of its first parameter when needed.
        cap: Most runs of this kind at once in one worker. Default: None, no limit but the worker's slots.
        dead_on: A tuple of exception types that end the job dead at once. Default: (), none.

    Raises:
        ConfigError: An option is wrong, or ``fn`` cannot be called.
    """

    def __init__(
        self,
        fn: Callable[..., Outcome],
        *,
        task: type[T] | None = None,
        cap: int | None = None,
        dead_on: tuple[type[Exception], ...] = (),
    ) -> None:
        if not callable(fn) or isinstance(fn, type):
            raise ConfigError(f"a handler must be a function, not {fn!r}; a task class goes into handler(task=...)")
        name = f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', None) or type(fn).__qualname__}"
        if any(_is_suspended(called) for called in (fn, type(fn).__call__)):
            raise ConfigError(f"{name} is a coroutine or a generator function: handlers are plain functions")
        functools.update_wrapper(self, fn)
        self.name: str = name
        self.fn = fn
        self.task = task
        self.cap: int | None = None if cap is None else checks.whole("cap", cap, 1)
        self.dead_on: tuple[type[Exception], ...] = _exceptions(dead_on)

    def __call__(self, task: T, /, *rest: t.Any) -> Outcome:
        return self.fn(task, *rest)

    def __repr__(self) -> str:
        return f"<venturi.Handler {self.name}>"


@attrs.frozen
class Bound:
    """A handler together with the task type that it turned out to handle."""

    handler: Handler[t.Any]
    task: TaskType
    takes_context: bool


class Registry:
    """The handlers and task classes of one queue.

    Annotations are resolved when a worker starts, so that a handler may name a class that is defined or imported later.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handlers: list[Handler[t.Any]] = []
        self._tasks: dict[str, TaskType] = {}
        self._bound: dict[str, Bound] = {}

    def add(self, handler: Handler[t.Any]) -> None:
        """Take a handler in; the same function again is taken once.

        Raises:
            DuplicateKindError: Another handler of its kind is here already, as far as can be told before `bind`.
            ConfigError: Its signature or its task class is wrong, as far as can be told before `bind`; or the same
                function is here with other options.
        """
        with self._lock:
            for known in self._handlers:
                if known.fn is handler.fn and known.task is handler.task:
                    _check_options(known, handler)
                    return
            if not isinstance(_first_annotation(handler), str):
                self._bind(handler)
            self._handlers.append(handler)

    def know(self, task: TaskType) -> None:
        """Remember a task class by its kinds.

        Raises:
            DuplicateKindError: Another class has one of them in this queue.
        """
        if self._tasks.get(task.kind) is task:
            return
        for kind in task.kinds:
            other = self._tasks.get(kind)
            if other is not None and other.cls is not task.cls:
                raise DuplicateKindError(
                    f"the kind {kind!r} has two task classes in one queue: {_name(other.cls)} and {_name(task.cls)}"
                    + _same_source(other.cls, task.cls)
                )
        self._tasks.update(dict.fromkeys(task.kinds, task))

    def bind(self) -> None:
        """Resolve every handler.

        Raises:
            ConfigError: There is none, or one cannot be resolved, or one is here twice with unequal options; it is
                named.
            DuplicateKindError: Two handle one kind or alias.
        """
        with self._lock:
            if not self._handlers:
                raise ConfigError("this queue has no handlers: import the modules that define them before work()")
            for handler in self._handlers:
                self._bind(handler)

    def find(self, kind: str) -> Bound:
        """The handler of a kind or alias, after `bind`.

        Raises:
            UnknownKindError: There is none.
        """
        try:
            return self._bound[kind]
        except KeyError:
            raise UnknownKindError(kind) from None

    def task(self, kind: str) -> TaskType:
        """The task class of a kind or alias, as far as this queue has met it.

        Raises:
            UnknownKindError: It has not.
        """
        try:
            return self._tasks[kind]
        except KeyError:
            raise UnknownKindError(kind) from None

    def names(self, kind: str) -> tuple[str, ...]:
        """The kind with its aliases, as far as its task class is known here."""
        task = self._tasks.get(kind)
        return (kind,) if task is None else task.kinds

    def __iter__(self) -> Iterator[Bound]:
        """The bound handlers, each once."""
        return iter({id(bound): bound for bound in self._bound.values()}.values())

    def _bind(self, handler: Handler[t.Any]) -> None:
        task = _task_of(handler)
        takes_context = _takes_context(handler)
        if takes_context:
            _check_carry(handler, task)
        self.know(task)
        for kind in task.kinds:
            other = self._bound.get(kind)
            if other is None:
                continue
            if other.handler.fn is not handler.fn:
                raise DuplicateKindError(
                    f"the kind {kind!r} has two handlers in one queue: {other.handler.name} and {handler.name}"
                    + _same_source(other.handler.fn, handler.fn)
                )
            _check_options(other.handler, handler)
        if task.kind not in self._bound:
            self._bound.update(dict.fromkeys(task.kinds, Bound(handler, task, takes_context)))


def _check_options(one: Handler[t.Any], again: Handler[t.Any]) -> None:
    """The same function may be registered for a kind again, but not in another way."""
    for option, before, now in (("cap", one.cap, again.cap), ("dead_on", one.dead_on, again.dead_on)):
        if before != now:
            raise ConfigError(f"{option}={now!r}: {one.name} is in this queue already, with {option}={before!r}")


def _is_suspended(called: object) -> bool:
    """Whether a call of it only makes what would run."""
    return (
        inspect.iscoroutinefunction(called) or inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called)
    )


def _exceptions(value: object) -> tuple[type[Exception], ...]:
    given = t.cast("tuple[object, ...]", value if isinstance(value, tuple) else (value,))
    classes = tuple(each for each in given if isinstance(each, type) and issubclass(each, Exception))
    if given is not value or len(classes) < len(given):
        raise ConfigError(f"dead_on={value!r}: must be a tuple of exception classes")
    return classes


def _parameters(handler: Handler[t.Any]) -> list[inspect.Parameter]:
    """The parameters that a run must fill, which have to be one or two positional ones."""
    try:
        if sys.version_info >= (3, 14):
            from annotationlib import Format  # names that exist for type checkers only must not be evaluated

            signature = inspect.signature(handler.fn, annotation_format=Format.FORWARDREF)
        else:
            signature = inspect.signature(handler.fn)
    except ValueError as error:
        raise ConfigError(f"{handler.name}: its signature cannot be read: {error}") from error
    parameters = list(signature.parameters.values())
    needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(needed) not in (1, 2) or any(p.kind is p.KEYWORD_ONLY for p in needed):
        raise ConfigError(f"{handler.name}{signature}: a handler takes (task) or (task, ctx)")
    return needed


def _takes_context(handler: Handler[t.Any]) -> bool:
    return len(_parameters(handler)) == 2


def _first_annotation(handler: Handler[t.Any]) -> object:
    if handler.task is not None:
        return handler.task
    annotation = _parameters(handler)[0].annotation
    # A ForwardRef stands for a name that could not be evaluated yet; its text is.
    return getattr(annotation, "__forward_arg__", annotation)


def _task_of(handler: Handler[t.Any]) -> TaskType:
    annotation = _first_annotation(handler)
    if isinstance(annotation, str):
        annotation = _evaluate(handler, annotation)
    if t.get_origin(annotation) is t.Annotated:
        annotation = t.get_args(annotation)[0]
    if annotation is inspect.Parameter.empty:
        raise ConfigError(f"{handler.name}: annotate its first parameter with a task class, or use handler(task=...)")
    if not isinstance(annotation, type):
        raise ConfigError(f"{handler.name}: {annotation!r} is no task class")
    try:
        return task_type(annotation)
    except TypeError as error:
        raise ConfigError(f"{handler.name}: {error}") from error


def _evaluate(handler: Handler[t.Any], annotation: str) -> object:
    fn = _function(handler.fn)
    names = getattr(fn, "__globals__", {}), {} if fn is None else _closure(fn)
    try:
        value: object = eval(annotation, *names)  # annotations are code of the same module
        # One in quotes where all are postponed is a text in a text.
        return eval(value, *names) if isinstance(value, str) else value
    except Exception as error:
        raise ConfigError(
            f"{handler.name}: the annotation {annotation!r} does not resolve ({error}); "
            f"import the class outside TYPE_CHECKING or write handler(task={annotation})"
        ) from error


def _closure(fn: t.Any) -> dict[str, object]:
    values: dict[str, object] = {}
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False):
        with suppress(ValueError):  # a variable without a value yet, of no concern to an annotation
            values[name] = cell.cell_contents
    return values


def _function(fn: t.Any) -> t.Any:
    """The plain function inside a partial, method or callable object; None for a builtin."""
    fn = inspect.unwrap(fn)
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = getattr(fn, "__func__", fn)
    return fn if inspect.isfunction(fn) else getattr(type(fn).__call__, "__wrapped__", type(fn).__call__)


def _check_carry(handler: Handler[t.Any], task: TaskType) -> None:
    annotation = _parameters(handler)[1].annotation
    if isinstance(annotation, str):
        try:
            annotation = _evaluate(handler, annotation)
        except ConfigError:
            # The context's annotation is not needed to run; names that exist for type checkers only are fine in it.
            return
    if t.get_origin(annotation) is not Context:
        return
    carry = t.get_args(annotation)[0]
    declared = type(None) if task.carry is None else task.carry
    told = "no carry" if task.carry is None else f"carry={_name(declared)}"
    # dict[str, int] fits a carry declared as dict, and the other way round.
    fits = carry == declared or (t.get_origin(carry) or carry) is (t.get_origin(declared) or declared)
    if not fits and carry is not t.Any and not isinstance(carry, t.TypeVar):
        raise ConfigError(f"{handler.name}: takes Context[{_name(carry)}], but {_name(task.cls)} declares {told}")


def _name(thing: t.Any) -> str:
    if isinstance(thing, type) and not t.get_args(thing):
        return thing.__qualname__ if thing.__module__ == "builtins" else f"{thing.__module__}.{thing.__qualname__}"
    return repr(thing)


def _same_source(one: t.Any, other: t.Any) -> str:
    name = getattr(one, "__qualname__", None)
    if name is None or name != getattr(other, "__qualname__", None) or one.__module__ == other.__module__:
        return ""
    return "; if this is one file imported under two names, import it under one"
