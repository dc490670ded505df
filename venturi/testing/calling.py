"""Run one handler without a database."""

from __future__ import annotations

import contextvars
import inspect
import json
import math
import time
import typing as t
import uuid
from collections.abc import Mapping, Sequence

import attrs
from typing_extensions import TypeVar

from venturi import codec
from venturi.carry import read_carry, write_carry
from venturi.context import Context, RunSignal, enter
from venturi.errors import Reason
from venturi.ids import uuid7
from venturi.outcome import Completed, Outcome, Pause
from venturi.registry import Bound, Handler, Registry
from venturi.task import TaskType
from venturi.values import Entry

__all__ = ["Called", "call"]

T = TypeVar("T")
C = TypeVar("C", default=None)


@attrs.frozen
class Called(t.Generic[C]):
    """What a handler did.

    Attributes:
        outcome: What it returned.
        carry: The carry as the next run would find it; None for a task without.
        evidence: What it attached, as the journal would hold it.
    """

    outcome: Outcome
    carry: C
    evidence: Mapping[str, t.Any]


@t.overload
def call(
    handler: Handler[T],
    task: T,
    /,
    *,
    state: object = ...,
    run_count: int = ...,
    failure_count: int = ...,
    history: Sequence[Entry] = ...,
    cancelled: Reason | None = ...,
    id: uuid.UUID | None = ...,
) -> Called[t.Any]: ...
@t.overload
def call(
    handler: Handler[T],
    task: T,
    /,
    *,
    carry: C,
    state: object = ...,
    run_count: int = ...,
    failure_count: int = ...,
    history: Sequence[Entry] = ...,
    cancelled: Reason | None = ...,
    id: uuid.UUID | None = ...,
) -> Called[C]: ...
def call(
    handler: Handler[T],
    task: T,
    /,
    *,
    carry: t.Any = attrs.NOTHING,
    state: object = None,
    run_count: int = 1,
    failure_count: int = 0,
    history: Sequence[Entry] = (),
    cancelled: Reason | None = None,
    id: uuid.UUID | None = None,
) -> Called[t.Any]:
    """Run a handler once, as a worker would, without a database.

    It runs in a context of its own, like every run, so that context variables of the test are not seen.

    Args:
        handler: The decorated function.
        task: Its task; encoded and decoded on the way, like the carry.
        carry: The job's carry. Left out: as on a first run.
        state: Given as ``ctx.state``. Default: None.
        run_count: Default: 1.
        failure_count: Default: 0.
        history: Given as ``ctx.history``. Default: no entries.
        cancelled: The reason for which the run is told to stop before it begins. Default: None, it is not.
        id: The job. Default: None, a new one.

    Returns:
        Outcome, carry and evidence.

    Raises:
        Exception: What the handler raised.
        PayloadError: Task, carry or evidence cannot be stored.
        TypeError: The task is another handler's, or the handler returned none of None, Completed and Pause.
        ConfigError: The handler cannot be used.
    """
    bound = _bound(handler)
    sent = _sent(task, bound.task)
    evidence: dict[str, object] = {}
    context: Context[t.Any, t.Any] = Context(
        id=uuid7() if id is None else id,
        kind=bound.task.kind,
        run_count=run_count,
        failure_count=failure_count,
        carry=bound.task.new_carry() if carry is attrs.NOTHING else _stored(carry, bound.task),
        state=state,
        signal=_signal(bound.task, cancelled),
        evidence=evidence,
        history=lambda: list(history),
    )

    def run() -> object:
        enter(context)
        return handler.fn(sent, context) if bound.takes_context else handler.fn(sent)

    outcome = _returned(contextvars.Context().run(run))
    stored = None if bound.task.carry is None else _stored(context.carry, bound.task)
    return Called(outcome, stored, json.loads(codec.plain(evidence)))


def _bound(handler: Handler[t.Any]) -> Bound:
    if not isinstance(handler, Handler):  # pyright: ignore[reportUnnecessaryIsInstance] - not all callers are typed
        raise TypeError(f"call() takes a function decorated with @venturi.handler, not {handler!r}")
    registry = Registry()
    registry.add(handler)
    registry.bind()
    return next(iter(registry))


def _sent(task: object, type_: TaskType) -> t.Any:
    if type(task) is not type_.cls:
        raise TypeError(f"the handler takes a {type_.cls.__qualname__}, not {type(task).__qualname__}")
    return codec.decode(codec.encode(task, type_.cls), t.cast("type[t.Any]", type_.cls))


def _stored(carry: object, type_: TaskType) -> t.Any:
    return read_carry(write_carry(carry, type_), type_)


def _signal(type_: TaskType, cancelled: Reason | None) -> RunSignal:
    signal = RunSignal(math.inf)
    if type_.timeout is not None:
        signal.timeout_at = time.monotonic() + type_.timeout
    if cancelled is not None:
        signal.tell(cancelled)
    return signal


def _returned(result: object) -> Outcome:
    if result is None or isinstance(result, (Completed, Pause)):
        return result
    if inspect.iscoroutine(result):
        result.close()
    raise TypeError(f"the handler returned {result!r}, which is none of None, Completed and Pause")
