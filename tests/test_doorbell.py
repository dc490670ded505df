"""The doorbell: no producer rings in vain while workers are busy, and none is unheard when they sleep.

Every worker here polls once an hour, so that a wake-up that is lost shows at once. The harness must be able to fail:
the same scenes are played with one step of the protocol left out, and have to lose a job then.
"""

from __future__ import annotations

import collections.abc as cabc
import datetime as dt
import functools
import random
import threading
import time
import typing as t
import uuid

import psycopg
import pytest
from fixtures.proxy import Proxy
from fixtures.waiting import eventually
from fixtures.waking import Began, Ping
from fixtures.work import parked, working

import venturi
from venturi.store import sql
from venturi.worker import listener
from venturi.worker.looks import Looks

Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[t.Any]]

LATE = 1.5
"""Seconds after which a job that is due counts as lost; a worker beside an open transaction looks every second."""


@pytest.fixture
def schema(emptied: str) -> str:
    """All tests here are content with one schema, emptied in between."""
    return emptied


class Runs(Began):
    """Which jobs have begun to run, and when."""

    def delay(self, job: uuid.UUID, since: float) -> float | None:
        """Seconds from then until the job began to run; None when it is late."""
        with self._changed:
            if not self._changed.wait_for(lambda: job in self.at, max(0.0, since + LATE - time.monotonic())):
                return None
            return self.at[job] - since


def late_commit(queue: venturi.Queue, producer: venturi.Queue, connect: Connect) -> float | None:
    """A producer looks before the worker parks and commits after it has: seconds until the job runs, None when lost."""
    runs = Runs(queue)
    with connect() as early, connect(autocommit=True) as observer:
        job = producer.enqueue(Ping(), conn=early).id
        with working(queue, poll=3600):
            parked(observer)
            time.sleep(0.2)
            early.commit()
            return runs.delay(job, time.monotonic())


@pytest.mark.conformance(170, 265)
def test_a_producer_that_commits_after_the_worker_has_parked_is_heard(
    queue: venturi.Queue, producer: venturi.Queue, connect: Connect
) -> None:
    """INFLIGHT tells the worker that it may not sleep yet, so it polls until that transaction is over (case 108)."""
    assert late_commit(queue, producer, connect) is not None


def test_without_inflight_that_producer_is_not_heard(
    queue: venturi.Queue, producer: venturi.Queue, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scene above tells a broken protocol from a whole one."""
    monkeypatch.setattr(sql, "QUIET", "SELECT true")
    assert late_commit(queue, producer, connect) is None


def slow_listener(
    queue: venturi.Queue, producer: venturi.Queue, proxy: Proxy, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> float | None:
    """A job is due while the listener waits for an answer and gives PARKED up late: seconds until the next job runs."""
    monkeypatch.setattr(listener, "PING_SECONDS", 0.1)
    runs = Runs(queue)
    listened = venturi.Queue(queue.schema, dsn=queue.store.dsn, listen_dsn=proxy.dsn)
    listened.handler(t.cast(t.Any, runs._handle))  # pyright: ignore[reportPrivateUsage]
    with connect(autocommit=True) as observer, working(listened, poll=3600):
        due = producer.enqueue(Ping(), delay=dt.timedelta(seconds=0.6)).id
        time.sleep(0.2)
        parked(observer)
        proxy.hold()
        assert runs.delay(due, time.monotonic()) is not None
        time.sleep(0.3)
        proxy.resume()
        time.sleep(0.3)
        delay = runs.delay(producer.enqueue(Ping()).id, time.monotonic())
    listened.close()
    return delay


def test_a_listener_that_gives_parked_up_late_does_not_put_the_worker_to_sleep(
    queue: venturi.Queue, producer: venturi.Queue, proxy: Proxy, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the worker may sleep is never read off a parking that it has asked to end."""
    assert slow_listener(queue, producer, proxy, connect, monkeypatch) is not None


class Scene:
    """Pairs of producers: a quick one that wakes the worker, and one whose transaction commits some time after."""

    def __init__(self, producer: venturi.Queue, connect: Connect, seed: int) -> None:
        self._random = random.Random(seed)
        self._producer = producer
        self._quick, self._slow = connect(), connect()

    def play(self, runs: Runs) -> list[float | None]:
        """One pair, and silence until both have run."""
        pause, hold = self._random.random() * 0.002, self._random.choice((0.0, 0.0, 0.003, 0.04))
        first = self._producer.enqueue(Ping(), conn=self._quick).id
        self._quick.commit()
        began = time.monotonic()
        time.sleep(pause)
        second = self._producer.enqueue(Ping(), conn=self._slow).id
        time.sleep(hold * self._random.random())
        self._slow.commit()
        return [runs.delay(first, began), runs.delay(second, time.monotonic())]


def play(
    queue: venturi.Queue, producer: venturi.Queue, connect: Connect, *, workers: int, seconds: float
) -> list[float | None]:
    """Random scenes for some seconds; the delays of all jobs."""
    runs, scene = Runs(queue), Scene(producer, connect, seed=1)
    delays = list[float | None]()
    until = time.monotonic() + seconds
    running = [queue.work(block=False, poll=3600, concurrency=2) for _ in range(workers)]
    try:
        while time.monotonic() < until and None not in delays:
            delays += scene.play(runs)
    finally:
        for worker in running:
            worker.stop()
        for worker in running:
            worker.join(10)
    return delays


@pytest.mark.conformance(170)
@pytest.mark.parametrize("workers", [1, 2])
def test_no_wake_up_is_lost_at_the_edge_of_sleep(
    queue: venturi.Queue, producer: venturi.Queue, connect: Connect, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """With workers that park in a hurry, every job of every scene runs soon after its commit (case 108)."""
    monkeypatch.setattr("venturi.worker.looks.LINGER", 0.0)
    monkeypatch.setattr("venturi.worker.looks.RESTLESS", 0.0)
    delays = play(queue, producer, connect, workers=workers, seconds=2)
    assert len(delays) > 20
    assert None not in delays


def test_the_random_scenes_find_a_broken_protocol(
    queue: venturi.Queue, producer: venturi.Queue, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With INFLIGHT left out a job is lost within seconds."""
    monkeypatch.setattr("venturi.worker.looks.LINGER", 0.0)
    monkeypatch.setattr("venturi.worker.looks.RESTLESS", 0.0)
    monkeypatch.setattr(sql, "QUIET", "SELECT true")
    assert None in play(queue, producer, connect, workers=1, seconds=15)


@pytest.mark.conformance(177)
def test_busy_workers_are_not_notified(queue: venturi.Queue, producer: venturi.Queue, connect: Connect) -> None:
    """A thousand enqueues from eight threads, while every slot is taken, send next to no notification.

    Cases 096, 111.
    """
    started, go = threading.Event(), threading.Event()

    @queue.handler
    def handle(task: Ping) -> None:
        started.set()
        go.wait(20)

    with connect(autocommit=True) as ear, working(queue, concurrency=1, poll=3600):
        producer.enqueue(Ping())
        assert started.wait(5)
        eventually(lambda: parked_sessions(ear) == 0, what="the worker has left its parking place")
        ear.execute(sql.Sql(queue.schema)(sql.LISTEN))
        _enqueue_from_threads(producer, threads=8, each=125)
        assert heard(ear) < 100
        go.set()


@pytest.mark.conformance(177)
def test_most_commits_do_not_notify_workers_that_keep_up(
    queue: venturi.Queue, producer: venturi.Queue, connect: Connect
) -> None:
    """Three workers that are idle again and again in between are notified by fewer than half of a thousand commits.

    Case 111.
    """
    runs = Runs(queue)
    with (
        connect(autocommit=True) as ear,
        working(queue, poll=3600),
        working(queue, poll=3600),
        working(queue, poll=3600),
    ):
        ear.execute(sql.Sql(queue.schema)(sql.LISTEN))
        _enqueue_from_threads(producer, threads=8, each=125)
        assert heard(ear) < 500
        assert runs.delay(producer.enqueue(Ping()).id, time.monotonic()) is not None


@venturi.task("bell.other")
class Other:
    pass


@pytest.mark.conformance(177)
def test_a_worker_of_other_kinds_is_not_notified(
    queue: venturi.Queue, producer: venturi.Queue, connect: Connect
) -> None:
    """Enqueues of a kind that no parked worker handles send no notification, whoever else is parked."""
    runs = Runs(queue)
    with connect(autocommit=True) as ear, working(queue, poll=3600):
        parked(ear)
        ear.execute(sql.Sql(queue.schema)(sql.LISTEN))
        producer.enqueue(Other())
        producer.enqueue_many([Other()] * 3)
        assert heard(ear) == 0
        assert runs.delay(producer.enqueue_many([Other(), Ping()])[1].id, time.monotonic()) is not None
        assert heard(ear) > 0


@pytest.mark.conformance(170, 77)
def test_a_worker_of_a_former_kind_hears_of_a_merge_into_its_job(
    queue: venturi.Queue, producer: venturi.Queue, connect: Connect
) -> None:
    """A job of a former kind that a merge makes due is announced to those who know no other kind."""

    @venturi.task("bell.former")
    class Former:
        def dedup_key(self) -> str:
            return "one"

    @venturi.task("bell.present", aliases=["bell.former"])
    class Present:
        def dedup_key(self) -> str:
            return "one"

    began = threading.Event()
    queue.handler(task=Former)(lambda task: began.set())
    with connect(autocommit=True) as observer:
        queue.enqueue(Former(), delay=dt.timedelta(hours=1))
        with working(queue, poll=3600):
            parked(observer)
            assert producer.enqueue(Present()).action == "replaced"
            assert began.wait(5)


def test_a_notification_wakes_no_worker_of_other_kinds(
    queue: venturi.Queue, producer: venturi.Queue, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two parked workers the one that cannot do the job is left alone; a batch of both kinds wakes both."""
    other = venturi.Queue(queue.schema, dsn=queue.store.dsn)
    began = threading.Event()
    other.handler(task=Other)(lambda task: began.set())
    runs = Runs(queue)
    called: set[int] = set()
    original = Looks.called

    def noted(looks: Looks) -> None:
        called.add(id(looks))
        original(looks)

    with connect(autocommit=True) as observer, working(queue, poll=3600), working(other, poll=3600):
        parked(observer, 2)
        time.sleep(0.2)
        monkeypatch.setattr(Looks, "called", noted)
        for _ in range(3):
            parked(observer, 2)
            assert runs.delay(producer.enqueue(Ping()).id, time.monotonic()) is not None
        assert len(called) == 1
        parked(observer, 2)
        producer.enqueue_many([Other(), Ping()])
        assert began.wait(5)
        assert len(called) == 2
    other.close()


def _noted(began: set[str]) -> t.Callable[[object], None]:
    return lambda task: began.add(type(task).__name__)


def test_a_worker_of_very_many_kinds_is_heard_by_each(
    queue: venturi.Queue, producer: venturi.Queue, connect: Connect
) -> None:
    """It parks for all kinds by a single lock, and every enqueue of any of them wakes it."""
    began: set[str] = set()
    kinds: list[t.Any] = [venturi.task(f"bell.{n}")(type(f"Kind{n}", (), {})) for n in range(sql.MANY_KINDS + 1)]
    for each in kinds:
        queue.handler(task=each)(_noted(began))
    with connect(autocommit=True) as observer, working(queue, poll=3600):
        parked(observer)
        assert parked_sessions(observer) == 1
        for n in (0, sql.MANY_KINDS):
            parked(observer)
            producer.enqueue(kinds[n]())
            eventually(functools.partial(began.issuperset, [f"Kind{n}"]), what="the worker has heard of it")


def test_a_producer_that_cannot_enter_notifies(queue: venturi.Queue, producer: venturi.Queue, connect: Connect) -> None:
    """While some worker of the queue is about to sleep, and holds INFLIGHT, producers of any kind notify unasked."""
    statements = sql.Sql(queue.schema)
    with connect() as sleeper, connect(autocommit=True) as ear:
        assert sleeper.execute(statements(sql.QUIET)).fetchall() == [(True,)]
        ear.execute(statements(sql.LISTEN))
        producer.enqueue(Ping())
        assert heard(ear) == 1
        sleeper.rollback()
        producer.enqueue(Ping())
        assert heard(ear) == 0


def parked_sessions(connection: psycopg.Connection[t.Any]) -> int:
    query = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock' AND granted"
    return int(connection.execute(query).fetchall()[0][0])


def heard(connection: psycopg.Connection[t.Any]) -> int:
    """How many notifications have come."""
    connection.execute("SELECT 1")
    return len(list(connection.notifies(timeout=0)))


def _enqueue_from_threads(producer: venturi.Queue, *, threads: int, each: int) -> None:
    def enqueue() -> None:
        for _ in range(each):
            producer.enqueue(Ping())

    running = [threading.Thread(target=enqueue) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
