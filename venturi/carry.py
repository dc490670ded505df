"""The carry of a job as it is stored. Never set, and set to None, are not the same; each comes back as it was."""

from __future__ import annotations

import typing as t

from venturi import codec
from venturi.errors import PayloadError
from venturi.task import TaskType

__all__ = ["read_carry", "write_carry"]


def read_carry(text: str | None, task: TaskType) -> t.Any:
    """The carry that a run starts with: the stored one, or a fresh default when it was never set.

    Raises:
        PayloadError: The stored one cannot be decoded.
    """
    if text is None or task.carry is None:
        return task.new_carry()
    return None if text == "null" else codec.decode(text, task.carry)


def write_carry(value: object, task: TaskType) -> str:
    """The JSON text of a carry.

    Raises:
        PayloadError: It cannot be stored, or the task declares none.
    """
    if value is None:
        return "null"
    if task.carry is None:
        raise PayloadError(f"{task.cls.__qualname__} declares no carry", path="carry")
    try:
        return codec.encode(value, task.carry)
    except PayloadError as error:
        raise PayloadError(error.problem, path="carry" + error.path.removeprefix("$")) from error
