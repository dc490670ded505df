"""The jobs of the benchmarks: next to nothing, or what a typical job carries."""

from __future__ import annotations

import datetime as dt
import enum
import typing as t
import uuid
from collections.abc import Callable, Iterator

import venturi

__all__ = ["CHUNK", "PAYLOADS", "Noop", "Task", "Typed", "chunks"]

CHUNK = 1000
"""How many jobs one call of enqueue_many takes."""


class Channel(enum.Enum):
    """An enum for a payload to hold."""

    EMAIL = "email"
    LETTER = "letter"


@venturi.task("bench.noop")
class Noop:
    """A number."""

    i: int = 0


@venturi.task("bench.typed")
class Typed:
    """About 200 bytes of JSON in fields of several types."""

    i: int
    name: str
    due: dt.datetime
    account: uuid.UUID
    parts: list[int]
    channel: Channel


Task: t.TypeAlias = Noop | Typed


def _typed(i: int) -> Typed:
    return Typed(
        i, "the quarterly report of a customer who reads it on paper", dt.datetime(2026, 1, 31, 12, 30, tzinfo=dt.UTC),
        uuid.UUID(int=i), [1, 2, 3, 5, 8], Channel.EMAIL,
    )  # fmt: skip


PAYLOADS: dict[int, tuple[type[Task], Callable[[int], Task]]] = {0: (Noop, Noop), 200: (Typed, _typed)}
"""Class and maker of the tasks, by the size of their payload."""


def chunks(make: Callable[[int], Task], jobs: int) -> Iterator[list[Task]]:
    """So many tasks, numbered from 0, in the lists that enqueue_many takes."""
    for first in range(0, jobs, CHUNK):
        yield [make(i) for i in range(first, min(first + CHUNK, jobs))]
