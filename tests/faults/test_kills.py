"""Worker processes that are killed: what they held is run again by others, and the journal says what happened."""

from __future__ import annotations

import collections.abc as cabc
import pathlib
import signal
import time

import pytest
from faults.accounting import accounted
from faults.crew import Hand, at_work, begun, done
from faults.deeds import Deed, effects
from faults.labourer import STEPS
from fixtures.waiting import eventually

import venturi

pytestmark = pytest.mark.faults

Hire = cabc.Callable[..., Hand]


@pytest.mark.conformance(163, 168)
def test_jobs_of_a_killed_worker_are_begun_again_within_four_thirds_of_a_lease_and_ten_seconds(
    queue: venturi.Queue, dsn: str, schema: str, hire: Hire, log: pathlib.Path
) -> None:
    """kill -9 costs its running jobs four thirds of a lease and the delay of a recovery, and the journal names it.

    Case 062.
    """
    lease = 3.0
    jobs = [queue.enqueue(Deed("hang", once=True)).id for _ in range(8)]
    doomed = hire(concurrency=8, lease=lease, poll=60)
    begun(log, 8)
    other = hire(concurrency=8, lease=lease, poll=60)
    at_work(dsn, schema, other)
    killed = time.monotonic()
    doomed.kill()
    again = begun(log, 8, run=2, pid=other.pid)
    waits = sorted(each.at - killed for each in again)
    print(f"\nbegun again {waits[0]:.1f} to {waits[-1]:.1f} s after kill -9, with a lease of {lease:g} s")
    assert waits[-1] < lease * 4 / 3 + 10
    done(dsn, schema)
    other.stops()
    for job in jobs:
        first, second = queue.journal(job)
        assert (first.outcome, second.outcome) == ("recovered", "completed")
        assert f":{doomed.pid} ran out" in (first.note or "")
    assert accounted(dsn, schema, jobs, effects=effects(log)) == {"recovered": 8, "completed": 8}


@pytest.mark.parametrize("step", STEPS)
def test_a_worker_killed_at_any_step_of_a_jobs_life_loses_nothing(
    step: str, queue: venturi.Queue, dsn: str, schema: str, hire: Hire, log: pathlib.Path
) -> None:
    """A job whose end is not committed runs again, one whose end is committed does not."""
    job = queue.enqueue(Deed()).id
    doomed = hire(concurrency=1, lease=1, die_at=step)
    assert doomed.process.wait(20) == -signal.SIGKILL
    other = hire(concurrency=1, lease=1)
    at_work(dsn, schema, other)
    done(dsn, schema)
    other.stops()
    accounted(dsn, schema, [job], effects=effects(log))
    expected = ["completed"] if step == "settled" else ["recovered", "completed"]
    assert [entry.outcome for entry in queue.journal(job)] == expected


def test_a_job_that_ends_its_process_is_dead_at_the_backstop_and_delays_no_other(
    queue: venturi.Queue, dsn: str, schema: str, hire: Hire, log: pathlib.Path
) -> None:
    """A crash loop ends: each crash is journaled and counted, and other jobs are completed between crashes.

    Case 063.
    """
    poison = queue.enqueue(Deed("exit")).id
    killer = queue.enqueue(Deed("kill")).id
    good = [queue.enqueue(Deed()).id for _ in range(20)]
    hands = 0

    def over() -> bool:
        nonlocal hands
        if not running or running[-1].process.poll() is not None:
            running.append(hire(concurrency=2, lease=1, backstop=2))
            hands += 1
        return all(queue.job(id).status in ("dead", "completed") for id in (poison, killer, *good))  # type: ignore[union-attr]

    running: list[Hand] = []
    eventually(over, 60, what="everything is over")
    running[-1].stops()
    for job in (poison, killer):
        assert [entry.outcome for entry in queue.journal(job)] == ["recovered", "dead"]
    assert 2 < hands < 8
    accounted(dsn, schema, [poison, killer, *good], statuses=("completed", "dead"), effects=effects(log))
    assert [entry.outcome for id in good for entry in queue.journal(id)].count("completed") == len(good)
    crashes = [entry.recorded_at for id in (poison, killer) for entry in queue.journal(id)]
    assert all(queue.journal(id)[-1].recorded_at < max(crashes) for id in good)


def test_workers_killed_again_and_again_under_load_lose_nothing(
    queue: venturi.Queue, dsn: str, schema: str, hire: Hire, log: pathlib.Path
) -> None:
    """Whenever it hits, kill -9 leaves every job to be completed."""
    jobs = [receipt.id for receipt in queue.enqueue_many(Deed("sleep", 0.02) for _ in range(600))]
    steady = hire(concurrency=2, lease=1)
    for n in range(4):
        doomed = hire(concurrency=4, lease=1)
        begun(log, 1, pid=doomed.pid)
        time.sleep(0.1 * n)
        doomed.kill()
    done(dsn, schema, 40)
    steady.stops()
    outcomes = accounted(dsn, schema, jobs, effects=effects(log))
    assert outcomes["completed"] == 600
    assert outcomes["recovered"] > 0
