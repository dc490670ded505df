"""Worker processes that are asked to stop, at bad moments and impatiently."""

from __future__ import annotations

import collections.abc as cabc
import pathlib
import random
import signal
import time

import pytest
from faults.accounting import accounted
from faults.crew import Hand, at_work, begun, done, query
from faults.deeds import Deed, effects
from fixtures.waiting import eventually

import venturi

pytestmark = pytest.mark.faults

Hire = cabc.Callable[..., Hand]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopping_worker_keeps_jobs_longer_than_the_lease_to_their_end(
    number: signal.Signals, queue: venturi.Queue, dsn: str, schema: str, hire: Hire, log: pathlib.Path
) -> None:
    """While it drains, its leases are renewed: nobody else runs the job, and it is completed there (cases 067, 126)."""
    job = queue.enqueue(Deed("sleep", 4.0)).id
    first = hire(concurrency=1, lease=1, shutdown_timeout=20)
    begun(log, 1)
    idle = hire(concurrency=1, lease=1)
    at_work(dsn, schema, idle)
    first.send(number)
    assert first.ends()["settled"] == 1
    idle.stops()
    assert accounted(dsn, schema, [job], effects=effects(log)) == {"completed": 1}


def test_a_second_signal_gives_the_jobs_back_at_once(
    queue: venturi.Queue, dsn: str, schema: str, hire: Hire, log: pathlib.Path
) -> None:
    """Two SIGTERMs: another worker has the jobs at once, and no failure is counted (case 127)."""
    jobs = [queue.enqueue(Deed("hang", once=True)).id for _ in range(3)]
    stubborn = hire(concurrency=3, shutdown_timeout=60)
    begun(log, 3)
    other = hire(concurrency=3, poll=60)
    at_work(dsn, schema, other)
    stubborn.send(signal.SIGTERM)
    time.sleep(0.5)
    assert stubborn.process.poll() is None
    asked = time.monotonic()
    stubborn.send(signal.SIGTERM)
    assert len(stubborn.ends(5)["released"]) == 3
    print(f"gave up {time.monotonic() - asked:.2f} s after the second signal")
    done(dsn, schema)
    assert max(each.at for each in effects(log)) - asked < 2
    other.stops()
    assert accounted(dsn, schema, jobs, effects=effects(log)) == {"released": 3, "completed": 3}


def test_five_signals_within_a_moment_are_one_quick_stop(
    queue: venturi.Queue, dsn: str, schema: str, hire: Hire, log: pathlib.Path
) -> None:
    """However many there are: the claims are given back, and the exit is a clean one (case 127)."""
    job = queue.enqueue(Deed("hang", once=True)).id
    hand = hire(concurrency=1, shutdown_timeout=60)
    begun(log, 1)
    hand.send(signal.SIGTERM)
    time.sleep(0.05)
    for _ in range(4):  # no later: they have to come before the stop is over, and its handlers of signals with it
        hand.send(signal.SIGTERM)
    assert hand.ends(5)["released"] == [str(job)]
    other = hire(concurrency=1)
    done(dsn, schema)
    other.stops()
    assert accounted(dsn, schema, [job], effects=effects(log)) == {"released": 1, "completed": 1}


def test_a_handler_that_never_returns_does_not_hold_up_a_stop(
    queue: venturi.Queue, dsn: str, schema: str, hire: Hire, log: pathlib.Path
) -> None:
    """At the deadline its job is given back, and beside it others have run all the time (cases 025, 140)."""
    stuck = queue.enqueue(Deed("hang", once=True)).id
    hand = hire(concurrency=2, lease=1, shutdown_timeout=0.5)
    begun(log, 1)
    quick = [queue.enqueue(Deed()).id for _ in range(10)]
    begun(log, 11)
    time.sleep(2)  # two leases
    began = time.monotonic()
    assert hand.stops()["released"] == [str(stuck)]
    assert time.monotonic() - began < 0.5 + 5
    other = hire(concurrency=2, lease=1)
    done(dsn, schema)
    other.stops()
    assert accounted(dsn, schema, [stuck, *quick], effects=effects(log)) == {"released": 1, "completed": 11}


def test_a_handler_that_never_returns_after_its_claim_was_lost_does_not_hold_up_a_stop(
    queue: venturi.Queue, dsn: str, schema: str, hire: Hire, log: pathlib.Path
) -> None:
    """There is nothing to give back then, and nothing to wait for."""
    job = queue.enqueue(Deed("hang", once=True)).id
    hand = hire(concurrency=2, lease=1, shutdown_timeout=0.5)
    begun(log, 1)
    query(dsn, schema, "UPDATE {q}.live SET owner = gen_random_uuid() RETURNING id")
    eventually(lambda: "is lost" in hand.words, what="the worker knows")
    hand.send(signal.SIGTERM)
    assert hand.process.wait(0.5 + 5) == 0
    other = hire(concurrency=2, lease=1)
    done(dsn, schema)
    other.stops()
    accounted(dsn, schema, [job])


def test_stops_at_random_moments_under_load_strand_no_claim(
    queue: venturi.Queue, dsn: str, schema: str, hire: Hire, log: pathlib.Path
) -> None:
    """After an orderly exit no row is left claimed, and in the end every handler has run exactly once (case 128)."""
    dice = random.Random(20)
    jobs = [receipt.id for receipt in queue.enqueue_many(Deed("sleep", 0.02) for _ in range(3000))]
    for _ in range(10):
        hands = [hire(concurrency=8) for _ in range(2)]
        at_work(dsn, schema, *hands)
        for hand in hands:
            time.sleep(dice.uniform(0, 0.1))
            hand.send(signal.SIGTERM)
        for hand in hands:
            assert hand.ends()["unsettled"] == []
        assert query(dsn, schema, "SELECT count(*) FROM {q}.live WHERE owner IS NOT NULL") == [(0,)]
    last = hire(concurrency=16)
    done(dsn, schema)
    assert last.stops()["settled"] > 0, "the others were idle in the end"
    outcomes = accounted(dsn, schema, jobs, effects=effects(log))
    # Released is what was claimed and not yet begun.
    assert set(outcomes) <= {"completed", "released"}
    assert sorted(each.job for each in effects(log) if each.what == "start") == sorted(jobs)
