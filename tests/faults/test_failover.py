"""A primary that fails and a standby that takes its place: workers and producers follow by themselves."""

from __future__ import annotations

import collections
import collections.abc as cabc
import functools
import pathlib
import time
import typing as t

import psycopg
import pytest
from faults.accounting import accounted
from faults.crew import Hand, at_work, done, query
from faults.deeds import Deed, effects
from faults.pair import Node, Pair
from faults.test_restarts import Producer
from faults.wire import Wire
from fixtures.waiting import eventually

import venturi

pytestmark = pytest.mark.faults

Hire = cabc.Callable[..., Hand]


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest) -> cabc.Iterator[Pair]:
    """Two servers for one test each, which is named by the parameter."""
    pair = Pair(synchronous=request.param == "synchronous")
    yield pair
    pair.close()


@pytest.fixture(scope="module")
def dsn(pair: Pair) -> str:
    """The connection string that leads to whichever of the two takes writes."""
    return pair.dsn


def fail_over(
    pair: Pair, queue: venturi.Queue, schema: str, hire: Hire, log: pathlib.Path, *, lag: float = 0.0
) -> tuple[Producer, list[Hand]]:
    """Crash the primary under load, promote the standby, wait until all is done, and say how long it took.

    Args:
        lag: Seconds before the crash from which the standby hears nothing. Default: 0.
    """
    hands = [hire(pair.dsn, concurrency=4, lease=6, poll=1) for _ in range(2)]
    at_work(pair.dsn, schema, *hands)
    with Producer(queue, 0.005) as producer:
        time.sleep(2)
        if lag:
            pair.deafen()
            time.sleep(lag)
        failed = time.monotonic()
        back = pair.fail_over()
        enqueued = eventually(lambda: [at for at in producer.answered if at > back], 20, what="jobs are enqueued")
        ran = eventually(
            lambda: [each.at for each in effects(log) if each.at > back + 0.05 and each.what == "start"], 20
        )
        time.sleep(2)
    done(pair.dsn, schema, 30)
    for hand in hands:
        hand.stops()
    print(f"\npromoted {back - failed:.2f} s after the crash; back {ran[0] - back:.2f} s (a handler) and "
          f"{enqueued[0] - back:.2f} s (an enqueue) after that; {len(producer.ids)} enqueued, failed "
          f"{dict(producer.errors)}, the slowest took {producer.slowest:.1f} s")  # fmt: skip
    return producer, hands


@pytest.mark.parametrize("pair", ["synchronous"], indirect=True)
def test_a_failover_to_a_synchronous_standby_loses_nothing_that_was_acknowledged(
    pair: Pair, queue: venturi.Queue, schema: str, hire: Hire, log: pathlib.Path
) -> None:
    """Every enqueue that was answered is run, every run is journaled, and none that was recorded runs again."""
    producer, hands = fail_over(pair, queue, schema, hire, log)
    outcomes = accounted(pair.dsn, schema, producer.ids, effects=effects(log))
    assert set(outcomes) <= {"completed", "recovered", "released"}
    runs = collections.Counter(each.job for each in effects(log) if each.what == "start")
    assert max(runs.values()) == 1
    for hand in hands:
        assert "Traceback" not in hand.words


@pytest.mark.parametrize("pair", ["asynchronous"], indirect=True)
def test_a_failover_to_an_asynchronous_standby_loses_at_most_the_last_moments(
    pair: Pair, queue: venturi.Queue, schema: str, hire: Hire, log: pathlib.Path
) -> None:
    """Acknowledged enqueues may be gone and ended runs may be run again; what is there is whole, and is completed."""
    producer, _ = fail_over(pair, queue, schema, hire, log, lag=0.5)
    there = {row[0] for row in query(pair.dsn, schema, "SELECT id FROM {q}.jobs")}
    lost = [at for job, at in zip(producer.ids, producer.answered, strict=True) if job not in there]
    runs = collections.Counter(each.job for each in effects(log) if each.what == "start" and each.job in there)
    again = sum(count - 1 for count in runs.values())
    span = max(lost) - min(lost)
    print(f"lost {len(lost)} acknowledged enqueues of {span:.2f} s; {again} runs were made again")
    assert span < 1, "what was acknowledged before the standby fell behind is there"
    # The journal of a run that was lost is gone with it, so that the effects prove nothing here.
    accounted(pair.dsn, schema, there)
    assert set(runs) == there


@pytest.mark.parametrize("pair", ["led astray"], indirect=True)
def test_workers_and_producers_on_a_server_that_takes_no_writes_come_back_when_it_does(
    pair: Pair, schema: str, hire: Hire, log: pathlib.Path
) -> None:
    """An address that leads to the standby: said once, tried again on fresh connections, and good after promotion.

    Case 118.
    """
    eventually(lambda: pair.standby.execute("SELECT 1 FROM pg_namespace WHERE nspname LIKE 'queue%'"), 10)
    wire = Wire(pair.standby.dsn)
    queue: venturi.Queue = venturi.Queue(schema, dsn=wire.dsn)
    hand = hire(wire.dsn, concurrency=2, lease=3, poll=1)
    eventually(lambda: "(25006)" in hand.words, 10, what="the worker has met a server that takes no writes")
    for _ in range(2):
        dropped = producers(pair.standby)
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            queue.enqueue(Deed())
        eventually(functools.partial(renewed, pair.standby, dropped), what="its connection is a fresh one")
    time.sleep(1)
    back = pair.promote()
    job = eventually(lambda: enqueued(queue), 10, what="a job is enqueued")
    done(wire.dsn, schema)
    print(f"\nback {time.monotonic() - back:.2f} s after the promotion")
    assert hand.words.count("is a standby") == 1
    assert hand.words.count("database trouble, trying again") == 1
    hand.stops()
    queue.close()
    wire.close()
    accounted(pair.standby.dsn, schema, [job], effects=effects(log))


def producers(node: Node) -> set[int]:
    return {row[0] for row in node.execute(
        "SELECT pid FROM pg_stat_activity WHERE application_name = 'venturi producer'"
    )}  # fmt: skip


def renewed(node: Node, before: set[int]) -> bool:
    """Whether producers have connections, and none of those."""
    now = producers(node)
    return bool(now) and now.isdisjoint(before)


def enqueued(queue: venturi.Queue) -> t.Any:
    try:
        return queue.enqueue(Deed()).id
    except psycopg.Error:
        return None
