"""Run one handler without a database."""

from __future__ import annotations

import contextvars
import math
import typing as t
import uuid
from collections.abc import Mapping

import attrs
from typing_extensions import TypeVar

from venturi import codec
from venturi.carry import read_carry, write_carry
from venturi.context import Context, RunSignal, enter
from venturi.errors import Reason
from venturi.ids import uuid7
from venturi.outcome import Outcome
from venturi.registry import Handler, Registry
from venturi.task import TaskType

__all__ = ["Called", "call"]

T = TypeVar("T")
C = TypeVar("C", default=None)


@attrs.frozen
class Called(t.Generic[C]):
    """What a handler did.

    Attributes:
        outcome: What it returned.
        carry: The carry as it would be stored, decoded again.
        evidence: What it attached.
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
    cancelled: Reason | None = None,
    id: uuid.UUID | None = None,
) -> Called[t.Any]:
    """Run a handler once, as a worker would, without a database.

    Args:
        handler: The decorated function.
        task: Its task; encoded and decoded on the way, like the carry.
        carry: The job's carry. Left out: as on a first run.
        state: Given as ``ctx.state``. Default: None.
        run_count: Default: 1.
        failure_count: Default: 0.
        cancelled: The reason for which the run is told to stop before it begins. Default: None, it is not.
        id: The job. Default: None, a new one.

    Returns:
        Outcome, carry and evidence. What the handler raises reaches the test; ``ctx.history`` is empty.

    Raises:
        PayloadError: Task, carry or evidence cannot be stored.
        ConfigError: The handler cannot be used, or is for another task.
    """
    registry = Registry()
    registry.add(handler)
    registry.bind()
    bound = next(iter(registry))
    type_ = bound.task
    sent: t.Any = codec.decode(codec.encode(task, type_.cls), t.cast("type[t.Any]", type_.cls))
    signal = RunSignal(math.inf)
    if cancelled is not None:
        signal.tell(cancelled)
    evidence: dict[str, object] = {}
    context = Context[t.Any, t.Any](
        id=uuid7() if id is None else id,
        kind=type_.kind,
        run_count=run_count,
        failure_count=failure_count,
        carry=type_.new_carry() if carry is attrs.NOTHING else _stored(carry, type_),
        state=state,
        signal=signal,
        evidence=evidence,
        history=list,
    )

    def run() -> Outcome:
        enter(context)
        return handler(sent, context) if bound.takes_context else handler(sent)

    outcome = contextvars.Context().run(run)
    codec.plain(evidence)
    return Called(outcome, _stored(context.carry, type_), evidence)


def _stored(carry: t.Any, type_: TaskType) -> t.Any:
    return None if carry is None else read_carry(write_carry(carry, type_), type_)
