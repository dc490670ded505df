"""The listener: how it comes back from every loss of its session."""

from __future__ import annotations

import collections.abc as cabc
import itertools
import logging
import socket
import threading
import time
import typing as t

import psycopg
import pytest
from fixtures.proxy import Proxy
from fixtures.waiting import eventually
from fixtures.waking import Began, Ping
from fixtures.work import parked, working

import venturi
from venturi.store.sql import Sql
from venturi.store.store import Store
from venturi.worker import listener

Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[t.Any]]


@pytest.fixture
def schema(emptied: str) -> str:
    """All tests here are content with one schema, emptied in between."""
    return emptied


@pytest.mark.conformance(178)
def test_a_listener_that_was_killed_is_back_within_two_seconds(
    queue: venturi.Queue, producer: venturi.Queue, began: Began, observer: psycopg.Connection[t.Any]
) -> None:
    """And an enqueue after that wakes the worker within 250 ms (case 104)."""
    with working(queue, poll=60):
        parked(observer)
        (pid,) = listeners(observer)
        assert observer.execute("SELECT pg_terminate_backend(%s, 5000)", [pid]).fetchone() == (True,)
        since = time.monotonic()
        parked(observer)
        assert time.monotonic() - since < 2
        time.sleep(0.15)
        sent = time.monotonic()
        assert began.wait(producer.enqueue(Ping()).id) - sent < 0.25


@pytest.mark.conformance(178)
def test_a_listener_whose_peer_is_silently_gone_is_back_after_a_ping(
    schema: str, dsn: str, producer: venturi.Queue, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of a ping and of its answer, 25 and 10 s, is all that it takes; both are shortened here."""
    assert listener.PING_SECONDS + listener.ANSWER_SECONDS < 60 - 10
    monkeypatch.setattr(listener, "PING_SECONDS", 0.2)
    monkeypatch.setattr("venturi.worker.parts.ANSWER_SECONDS", 0.3)
    queue = venturi.Queue(schema, dsn=dsn, listen_dsn=proxy.dsn)
    began = Began(queue)
    with psycopg.connect(dsn, autocommit=True) as observer, working(queue, poll=60):
        parked(observer)
        (first,) = listeners(observer)
        proxy.hold()
        time.sleep(0.7)  # silent for longer than a ping and its answer may take
        proxy.resume()
        eventually(lambda: listeners(observer) and listeners(observer) != [first], what="another session listens")
        parked(observer)
        time.sleep(0.15)
        sent = time.monotonic()
        assert began.wait(producer.enqueue(Ping()).id) - sent < 0.25
    queue.close()


def listeners(connection: psycopg.Connection[t.Any]) -> list[int]:
    query = "SELECT pid FROM pg_stat_activity WHERE application_name = 'venturi listener' ORDER BY pid"
    return [pid for (pid,) in connection.execute(query)]


@pytest.fixture
def closed_door() -> cabc.Iterator[tuple[str, list[float]]]:
    """A server that hangs up on everyone, and the moments at which it did."""
    calls = list[float]()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        closing = threading.Event()

        def hang_up() -> None:
            while not closing.is_set():
                try:
                    server.accept()[0].close()
                except TimeoutError:
                    continue
                calls.append(time.monotonic())

        thread = threading.Thread(target=hang_up)
        thread.start()
        yield f"host=127.0.0.1 port={server.getsockname()[1]} sslmode=disable gssencmode=disable", calls
        closing.set()
        thread.join()


@pytest.mark.conformance(179)
def test_a_listener_that_cannot_connect_keeps_trying_ever_more_slowly(
    schema: str, dsn: str, closed_door: tuple[str, list[float]], caplog: pytest.LogCaptureFixture
) -> None:
    """100 ms doubling, undisturbed by hundreds of handlers that end meanwhile, and with one line in the log.

    Case 107.
    """
    door, calls = closed_door
    queue = venturi.Queue(schema, dsn=dsn, listen_dsn=door)
    Began(queue)
    with working(queue, poll=0.05):
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            queue.enqueue_many([Ping() for _ in range(10)])
            time.sleep(0.05)
    queue.close()
    gaps = [after - before for before, after in itertools.pairwise(calls)]
    assert 4 <= len(calls) <= 6
    assert all(0.09 * 2**n < gap < 0.1 * 2**n + 0.1 for n, gap in enumerate(gaps)), gaps
    assert [record.levelname for record in caplog.records if record.levelno >= logging.INFO] == ["WARNING"]


def test_a_listener_keeps_nothing_waiting_in_the_servers_queue(
    queue: venturi.Queue, producer: venturi.Queue, began: Began, observer: psycopg.Connection[t.Any]
) -> None:
    """It reads outside of any transaction, and a flood of notifications is one call to look up (case 110)."""
    with working(queue, poll=60):
        parked(observer)
        (pid,) = listeners(observer)
        flood = "SELECT count(pg_notify(%s, repeat('x', 50) || n)) FROM generate_series(1, 50000) n"
        observer.execute(flood, [Sql(queue.schema).channel])
        full = float(observer.execute("SELECT pg_notification_queue_usage()").fetchall()[0][0])

        def drained() -> bool:
            observer.execute(flood.replace("50000", "1"), [Sql(queue.schema).channel])
            return float(observer.execute("SELECT pg_notification_queue_usage()").fetchall()[0][0]) < full / 10

        eventually(drained, what="the server's queue of notifications is read")
        state = "SELECT state, xact_start, backend_xmin FROM pg_stat_activity WHERE pid = %s"
        eventually(lambda: observer.execute(state, [pid]).fetchone() == ("idle", None, None))
        sent = time.monotonic()
        assert began.wait(producer.enqueue(Ping()).id) - sent < 0.5


@pytest.mark.parametrize("state", ["parked", "busy", "away"])
def test_a_worker_does_not_wait_for_its_listener_when_it_stops(
    schema: str, dsn: str, closed_door: tuple[str, list[float]], observer: psycopg.Connection[t.Any], state: str
) -> None:
    """Whether that waits for notifications, hears them all the time, or is about to connect again (cases 104, 115)."""
    queue = venturi.Queue(schema, dsn=dsn, listen_dsn=closed_door[0] if state == "away" else None)
    Began(queue)
    with working(queue, poll=3600) as worker:
        if state == "away":
            eventually(lambda: len(closed_door[1]) >= 4, what="the listener has tried to connect")
        else:
            parked(observer)
        if state == "busy":
            observer.execute(
                "SELECT count(pg_notify(%s, n::text)) FROM generate_series(1, 5000) n", [Sql(schema).channel]
            )
        since = time.monotonic()
        worker.stop()
        assert worker.join(5) == venturi.Report(0)
        assert time.monotonic() - since < 1
    queue.close()


def test_a_listener_that_outlives_its_worker_makes_nothing_fail(
    queue: venturi.Queue, began: Began, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No patience ends the look-up of a host's name; what comes of it is of no interest any more (case 104)."""
    looking, found = threading.Event(), threading.Event()

    def hanging(this: Store, patience: object) -> t.NoReturn:
        looking.set()
        assert found.wait(10)
        raise psycopg.OperationalError("could not translate host name")

    monkeypatch.setattr(Store, "listening_session", hanging)
    monkeypatch.setattr("venturi.worker.worker.GRACE", 0.3)
    with working(queue) as worker:
        assert looking.wait(5)
        worker.stop()
        report = worker.join(5)
        found.set()
        eventually(lambda: all(thread.name != "venturi-listener" for thread in threading.enumerate()))
        assert worker.join() is report is not None
