"""Merges that race the claims of a busy worker."""

from __future__ import annotations

import collections
import typing as t
import uuid

import pytest
from fixtures.waiting import eventually
from fixtures.work import working

import venturi
from venturi import Combine, Merge, Pending, Replace


@venturi.task("race.replace")
class Newest:
    value: int

    def dedup_key(self) -> str:
        return "k"

    def merge(self, existing: Pending[Newest]) -> Merge[Newest]:
        return Replace()


@venturi.task("race.combine")
class Union:
    value: int

    def dedup_key(self) -> str:
        return "k"

    def merge(self, existing: Pending[Union]) -> Merge[Union]:
        return Combine(Union(max(self.value, existing.task.value)))


@pytest.mark.conformance(262)
@pytest.mark.parametrize("task", [Newest, Union], ids=["replace", "combine"])
def test_no_accepted_merge_goes_unseen_by_the_runs(queue: venturi.Queue, task: type[t.Any]) -> None:
    """A run sees the payload before, and the merge inserted a job, or it sees the merged one; 1 000 tries."""
    seen: dict[uuid.UUID, list[int]] = collections.defaultdict(list)
    accepted: dict[uuid.UUID, int] = {}
    actions = collections.Counter[str]()

    @queue.handler(task=task)
    def handle(given: t.Any, ctx: venturi.Context) -> None:
        seen[ctx.id].append(given.value)

    with working(queue, concurrency=2, poll=0.05):
        for value in range(1000):
            receipt = queue.enqueue(task(value))
            accepted[receipt.id] = value
            actions[receipt.action] += 1
        eventually(lambda: len(seen) == len(accepted), what="every job has run")
    assert {id_: [value] for id_, value in accepted.items()} == seen
    assert len(actions) == 2, "all on one side of the race: no race was tried"
