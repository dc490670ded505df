"""A server that goes away under load and comes back: workers go on by themselves, and no result is lost."""

from __future__ import annotations

import collections
import collections.abc as cabc
import pathlib
import threading
import time
import typing as t
import uuid

import psycopg
import pytest
from faults.accounting import accounted
from faults.crew import Hand, at_work, begun, done, query
from faults.deeds import Deed, effects
from fixtures.waiting import eventually

import venturi
from venturi import embedded

pytestmark = pytest.mark.faults

Hire = cabc.Callable[..., Hand]


class Producer(threading.Thread):
    """Enqueues all the time, and goes on when that fails.

    Attributes:
        ids: Jobs whose enqueue was answered.
        errors: Enqueues that raised, by type.
        slowest: Seconds that the longest one took.
        answered: When each one of `ids` was answered, on the monotonic clock.
    """

    def __init__(self, queue: venturi.Queue, pause: float) -> None:
        super().__init__(name="producer")
        self.ids: list[uuid.UUID] = []
        self.errors: collections.Counter[str] = collections.Counter()
        self.slowest = 0.0
        self.answered: list[float] = []
        self._queue = queue
        self._pause = pause
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(self._pause):
            began = time.monotonic()
            try:
                self.ids.append(self._queue.enqueue(Deed("sleep", 0.01)).id)
                self.answered.append(time.monotonic())
            except psycopg.Error as error:
                self.errors[type(error).__name__] += 1
            self.slowest = max(self.slowest, time.monotonic() - began)

    def __enter__(self) -> Producer:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self.join()


def rates(dsn: str, schema: str, since: float, until: float) -> list[int]:
    """Jobs completed in each second between two instants of the monotonic clock."""
    rows = query(
        dsn, schema,
        """SELECT (extract(epoch FROM e.recorded_at - statement_timestamp()) + %s)::float8 FROM {q}.journal e
            WHERE e.outcome = 0""",
        time.monotonic() - since,
    )  # fmt: skip
    seconds = collections.Counter(int(row[0] // 1) for row in rows)
    return [seconds[n] for n in range(int(until - since) + 1)]


@pytest.mark.conformance(121, 195, 197)
@pytest.mark.parametrize(("mode", "seconds", "lease"), [
    ("fast", 3, 6.0), ("immediate", 3, 6.0), ("fast", 40, 60.0), ("immediate", 40, 60.0),
])  # fmt: skip
def test_a_server_that_stops_under_load_costs_nothing_but_its_time(
    mode: t.Literal["fast", "immediate"], seconds: int, lease: float,
    victim: embedded.Server, queue: venturi.Queue, dsn: str, schema: str, hire: Hire, log: pathlib.Path,
) -> None:  # fmt: skip
    """What handlers finished meanwhile is recorded, none of them runs twice, and the workers need no help.

    Case 117.
    """
    hands = [hire(concurrency=4, lease=lease, poll=1) for _ in range(2)]
    at_work(dsn, schema, *hands)
    with Producer(queue, 0.005) as producer:
        began = time.monotonic()
        time.sleep(3)
        long = [Deed("sleep", share * seconds) for share in (0.5, 1.2)]
        across = [receipt.id for receipt in queue.enqueue_many(long, priority=venturi.Priority.HIGH)]
        eventually(lambda: {*across} <= {each.job for each in effects(log)}, what="the long jobs have begun")
        victim.stop(mode)
        time.sleep(seconds)
        assert all(hand.process.poll() is None for hand in hands)
        victim.start()
        back = time.monotonic()
        eventually(lambda: sum(rates(dsn, schema, back, time.monotonic())), 15, what="jobs are completed again")
        resumed = time.monotonic()
        enqueued = eventually(lambda: [at for at in producer.answered if at > back], 15, what="jobs are enqueued again")
        time.sleep(4)
    done(dsn, schema, lease * 2 + 20)
    drained = time.monotonic()
    for hand in hands:
        hand.stops()
    print(f"\n{mode} {seconds} s: after the server, workers back in {resumed - back:.2f} s, the producer in "
          f"{enqueued[0] - back:.2f} s; completed per second {rates(dsn, schema, began, drained)}; enqueues failed "
          f"{dict(producer.errors)}, the slowest took {producer.slowest:.1f} s")  # fmt: skip
    outcomes = accounted(dsn, schema, [*producer.ids, *across], effects=effects(log))
    assert set(outcomes) <= {"completed", "recovered"}
    for job in across:
        assert [entry.outcome for entry in queue.journal(job)] == ["completed"]
    # Nobody runs what another one still runs or has finished: recovered is only what was claimed and never begun.
    runs = collections.Counter(each.job for each in effects(log) if each.what == "start")
    assert max(runs.values()) == 1
    assert outcomes["recovered"] <= 8
    for hand in hands:
        troubles, ends = (hand.words.count(f"database trouble{rest}") for rest in (", trying again", " is over"))
        assert 1 <= troubles == ends <= 2
        assert "Traceback" not in hand.words


@pytest.mark.conformance(188)
def test_a_stop_while_the_server_is_away_ends_by_its_deadline(
    victim: embedded.Server, queue: venturi.Queue, dsn: str, schema: str, hire: Hire, log: pathlib.Path
) -> None:
    """It reports what it could not record; the jobs are run again when the server is back."""
    jobs = [queue.enqueue(Deed("sleep", 1.0)).id, queue.enqueue(Deed("wait", 60.0, once=True)).id]
    hand = hire(concurrency=2, lease=2, shutdown_timeout=3)
    begun(log, 2)
    victim.stop()
    began = time.monotonic()
    report = hand.stops()
    print(f"\nended {time.monotonic() - began:.1f} s after SIGTERM with a deadline of 3 s")
    assert time.monotonic() - began < 3 + 5
    assert sorted(report["unsettled"]) == sorted(map(str, jobs))
    victim.start()
    other = hire(concurrency=2, lease=2)
    done(dsn, schema)
    other.stops()
    assert accounted(dsn, schema, jobs, effects=effects(log)) == {"recovered": 2, "completed": 2}


@pytest.mark.conformance(198)
def test_a_worker_that_is_started_without_a_server_waits_for_it(
    victim: embedded.Server, queue: venturi.Queue, dsn: str, schema: str, hire: Hire, log: pathlib.Path
) -> None:
    """It comes up by itself, and is woken at once by what is enqueued then (case 106)."""
    job = queue.enqueue(Deed()).id
    victim.stop()
    hand = hire(concurrency=1, poll=60)
    time.sleep(3)
    assert hand.process.poll() is None, hand.words
    victim.start()
    done(dsn, schema)
    at_work(dsn, schema, hand)
    late = queue.enqueue(Deed()).id
    done(dsn, schema, 5)
    hand.stops()
    assert accounted(dsn, schema, [job, late], effects=effects(log)) == {"completed": 2}
