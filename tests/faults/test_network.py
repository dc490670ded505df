"""A network that delays, cuts, and lets peers vanish without a word."""

from __future__ import annotations

import collections.abc as cabc
import pathlib
import time

import pytest
from faults.accounting import accounted
from faults.crew import Hand, at_work, begun, done, query
from faults.deeds import Deed, effects
from faults.wire import Wire

import venturi

pytestmark = pytest.mark.faults

Hire = cabc.Callable[..., Hand]


def test_a_slow_network_costs_time_only(
    queue: venturi.Queue, wire: Wire, dsn: str, schema: str, hire: Hire, log: pathlib.Path
) -> None:
    """With 100 ms each way renewals still come in time, and every job runs once."""
    wire.delay(0.1)
    hand = hire(wire.dsn, concurrency=8, lease=3, poll=1)
    at_work(dsn, schema, hand, timeout=20)
    jobs = [receipt.id for receipt in queue.enqueue_many([Deed("sleep", 0.05)] * 80 + [Deed("sleep", 5.0)] * 2)]
    done(dsn, schema, 30)
    hand.stops(20)
    assert accounted(dsn, schema, jobs, effects=effects(log)) == {"completed": 82}


def test_connections_that_are_cut_again_and_again_lose_nothing(
    queue: venturi.Queue, wire: Wire, dsn: str, schema: str, hire: Hire, log: pathlib.Path
) -> None:
    """Cut at random, five times a second, in the middle of claims and settles: what was begun is run once."""
    jobs = [receipt.id for receipt in queue.enqueue_many(Deed("sleep", 0.02) for _ in range(500))]
    hands = [hire(wire.dsn, concurrency=4, lease=2, poll=1) for _ in range(2)]
    at_work(dsn, schema, *hands)
    deadline = time.monotonic() + 6
    while time.monotonic() < deadline:
        time.sleep(0.2)
        wire.cut()
    done(dsn, schema, 40)
    for hand in hands:
        hand.stops()
        assert "database trouble" in hand.words
    outcomes = accounted(dsn, schema, jobs, effects=effects(log))
    assert outcomes["completed"] == 500
    # Recovered is only what was claimed by a turn whose answer was cut off.
    starts = [each.job for each in effects(log) if each.what == "start"]
    assert sorted(starts) == sorted(jobs)


def test_a_network_that_stands_still_for_a_moment_is_waited_for(
    queue: venturi.Queue, wire: Wire, dsn: str, schema: str, hire: Hire, log: pathlib.Path
) -> None:
    """Shorter than the lease and every deadline: nothing is lost, run twice, or logged."""
    jobs = [receipt.id for receipt in queue.enqueue_many(Deed("sleep", 0.1) for _ in range(200))]
    hand = hire(wire.dsn, concurrency=4, lease=10, poll=1)
    begun(log, 10)
    wire.hold()
    time.sleep(1)  # what was on its way has arrived
    before = query(dsn, schema, "SELECT count(*) FROM {q}.journal")
    time.sleep(2)
    assert query(dsn, schema, "SELECT count(*) FROM {q}.journal") == before
    wire.resume()
    done(dsn, schema, 30)
    hand.stops()
    assert accounted(dsn, schema, jobs, effects=effects(log)) == {"completed": 200}
    assert "WARNING" not in hand.words


def test_peers_that_vanish_without_a_word_are_given_up_after_30_seconds(
    queue: venturi.Queue, wire: Wire, dsn: str, schema: str, hire: Hire, log: pathlib.Path
) -> None:
    """Half-open connections: others take the jobs meanwhile, and the worker comes back by itself."""
    jobs = [queue.enqueue(Deed("sleep", 2.0)).id for _ in range(4)]
    cut_off = hire(wire.dsn, concurrency=4, lease=2, poll=1)
    begun(log, 4)
    wire.strand()
    stranded = time.monotonic()
    other = hire(concurrency=4, lease=2, poll=1)
    done(dsn, schema)
    assert {each.pid for each in effects(log) if each.run == 2} == {other.pid}
    other.stops()
    late = queue.enqueue(Deed()).id
    done(dsn, schema, 50)
    back = time.monotonic() - stranded
    print(f"\nback {back:.0f} s after its connections went silent")
    assert 25 < back < 45
    cut_off.stops()
    assert cut_off.words.count("is not recorded, its claim was lost") == 4
    assert accounted(dsn, schema, [*jobs, late], effects=effects(log)) == {"recovered": 4, "completed": 5}
