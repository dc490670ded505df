"""Handlers that do their worst: to the worker, to the journal, and to the process."""

from __future__ import annotations

import collections.abc as cabc
import pathlib

import pytest
from faults.accounting import accounted
from faults.crew import Hand, done
from faults.deeds import Deed, effects

import venturi

pytestmark = pytest.mark.faults

Hire = cabc.Callable[..., Hand]

RAISED = ("SystemExit", "KeyboardInterrupt", "GeneratorExit", "BaseException", "Rude")


@pytest.mark.parametrize("concurrency", [1, 4])
def test_whatever_a_handler_raises_is_a_failure_of_its_run_alone(
    concurrency: int, queue: venturi.Queue, dsn: str, schema: str, hire: Hire, log: pathlib.Path
) -> None:
    """Each is journaled as a failed run with its name, is tried again, and the slots go on (case 021)."""
    raising = {act: queue.enqueue(Deed(act, once=True)).id for act in RAISED}
    normal = [queue.enqueue(Deed()).id for _ in range(10)]
    hand = hire(concurrency=concurrency, lease=60, poll=1)
    done(dsn, schema)
    assert hand.stops()["settled"] == 10 + 2 * len(RAISED)
    for act, job in raising.items():
        entry, last = queue.journal(job)
        assert (entry.outcome, last.outcome) == ("retried", "completed")
        assert act in (entry.note or "")
    accounted(dsn, schema, [*raising.values(), *normal], effects=effects(log))


def test_messages_of_50_mb_are_cut_and_stop_nothing(
    queue: venturi.Queue, dsn: str, schema: str, hire: Hire, log: pathlib.Path
) -> None:
    """Their jobs are retried and dead like others, with an entry of some kilobytes per run (case 016)."""
    jobs = [queue.enqueue(Deed("huge")).id for _ in range(3)]
    hand = hire(concurrency=3, lease=5, backstop=2, poll=1)
    done(dsn, schema)
    hand.stops()
    for job in jobs:
        entries = queue.journal(job)
        assert [entry.outcome for entry in entries] == ["retried", "dead"]
        for entry in entries:
            assert 4096 < len(entry.note or "") <= 8192
            assert 4096 < len(entry.traceback or "") <= 16384
    accounted(dsn, schema, jobs, statuses=["dead"], effects=effects(log))
    assert len(hand.words) < 100_000


def test_pauses_retries_and_permanent_failures_add_up(
    queue: venturi.Queue, dsn: str, schema: str, hire: Hire, log: pathlib.Path
) -> None:
    """Runs of every kind at once: one entry each."""
    acts = ["pause", "fail", "permanent", "sleep"]
    jobs = [queue.enqueue(Deed(act, once=act == "fail")).id for act in acts for _ in range(25)]
    hand = hire(concurrency=8, lease=5, poll=1)
    done(dsn, schema)
    hand.stops()
    outcomes = accounted(dsn, schema, jobs, statuses=("completed", "dead"), effects=effects(log))
    assert outcomes == {"completed": 75, "paused": 50, "retried": 25, "dead": 25}


@pytest.mark.parametrize("how", ["leave", "return", "exit", "enqueue"])
def test_a_handler_that_forks_leaves_no_child_in_the_workers_code(
    how: str, queue: venturi.Queue, dsn: str, schema: str, hire: Hire, log: pathlib.Path
) -> None:
    """However the child leaves the handler, it ends there, touches no session of the parent, and settles nothing."""
    jobs = [queue.enqueue(Deed(f"fork and {how}")).id for _ in range(6)]
    jobs += [queue.enqueue(Deed("sleep", 0.1)).id for _ in range(20)]
    hand = hire(concurrency=4, lease=2, poll=1)
    done(dsn, schema, 30)
    hand.stops()
    outcomes = accounted(dsn, schema, jobs)
    assert outcomes == {"completed": 32 if how == "enqueue" else 26}
    # One line for each end, but those of the children too, where they pass it.
    assert len({each.job for each in effects(log)}) == (32 if how == "enqueue" else 26)
    assert "WARNING" not in hand.words, hand.words
