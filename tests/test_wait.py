"""Waiting and waking: how soon a job is found, and how little an idle worker asks."""

from __future__ import annotations

import collections.abc as cabc
import datetime as dt
import logging
import random
import statistics
import time
import typing as t
import uuid

import psycopg
import pytest
from fixtures.program import Programs
from fixtures.proxy import Proxy
from fixtures.serverlog import ServerLog
from fixtures.sqltext import on
from fixtures.waiting import eventually
from fixtures.waking import CLAIM, Began, Ping, Pong
from fixtures.work import ended, parked, working
from psycopg import conninfo

import venturi
from venturi.store import migrate
from venturi.worker import listener
from venturi.worker.settings import Settings

Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[t.Any]]


@pytest.fixture
def schema(emptied: str) -> str:
    """All tests here are content with one schema, emptied in between."""
    return emptied


WORKER = """
@venturi.task("ping")
class Ping:
    number: int = 0

@queue.handler
def handle(task: Ping) -> None:
    say("began", task.number, time.monotonic())

queue.work(poll=60)
"""


@pytest.mark.conformance(170)
@pytest.mark.slow
def test_a_parked_worker_in_another_process_starts_a_job_at_once(
    producer: venturi.Queue, program: Programs, observer: psycopg.Connection[t.Any]
) -> None:
    """Each of 50 within 250 ms, half of them within 20, although it polls once a minute."""
    worker = program(WORKER)
    producer.stats()  # opens its connection
    delays = list[float]()
    for number in range(50):
        parked(observer)
        time.sleep(0.11 if number else 0.5)
        parked(observer)
        sent = time.monotonic()
        producer.enqueue(Ping(number))
        delays.append(float(worker.hears(f"began {number}")) - sent)
    assert max(delays) < 0.25
    assert statistics.median(delays) < 0.02


@pytest.mark.conformance(170)
def test_a_worker_of_the_same_process_needs_no_notification(schema: str, dsn: str) -> None:
    """Within 50 ms with notifications off."""
    queue = venturi.Queue(schema, dsn=dsn, notify=False)
    began = Began(queue)
    with working(queue, poll=60):
        began.wait(queue.enqueue(Ping()).id)
        for _ in range(5):
            time.sleep(0.15)
            sent = time.monotonic()
            assert began.wait(queue.enqueue(Ping()).id) - sent < 0.05
    queue.close()


@pytest.mark.conformance(171)
def test_a_delayed_job_runs_at_its_time_whether_the_worker_had_parked_or_not(
    queue: venturi.Queue, producer: venturi.Queue, began: Began, observer: psycopg.Connection[t.Any]
) -> None:
    """800 ms after its enqueue, not at 700 and not after 1300, although the worker polls once a minute (case 091)."""
    delay = dt.timedelta(milliseconds=800)
    first, sent = producer.enqueue(Ping(), delay=delay).id, time.monotonic()
    with working(queue, poll=60):
        parked(observer)
        second, sent_again = producer.enqueue(Ping(), delay=delay).id, time.monotonic()
        assert 0.7 < began.wait(first) - sent < 1.3
        assert 0.7 < began.wait(second) - sent_again < 1.3


@pytest.mark.conformance(172)
@pytest.mark.slow
def test_a_job_that_becomes_due_while_the_worker_makes_up_its_mind_is_not_slept_over(
    queue: venturi.Queue, began: Began
) -> None:
    """200 jobs, due at random moments of the worker's way from a claim to its wait, each start within 250 ms.

    Case 091.
    """
    chance = random.Random(172)
    start = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=1)
    to_monotonic = time.monotonic() - time.time()
    due = dict[uuid.UUID, float]()
    offset = 0.0
    for number in range(200):
        offset += chance.choice((chance.random() * 0.01, chance.random() * 0.04))
        at = start + dt.timedelta(seconds=offset)
        due[queue.enqueue(Ping(number), at=at).id] = at.timestamp() + to_monotonic
    with working(queue, poll=60):
        late = [began.wait(job, 10) - moment for job, moment in due.items()]
    assert max(late) < 0.25
    assert min(late) > -0.01


@pytest.mark.conformance(173)
@pytest.mark.parametrize("skew", [3600.0, -3600.0])
def test_the_worker_s_clock_does_not_matter(
    schema: str, server_log: ServerLog, dsn: str, monkeypatch: pytest.MonkeyPatch, skew: float
) -> None:
    """An hour wrong, then stepped to the other side while it runs: jobs run on the database's time, without a spin.

    Cases 087, 093.
    """
    now, now_ns, wrong = time.time, time.time_ns, [skew]
    monkeypatch.setattr(time, "time", lambda: now() + wrong[0])
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + int(wrong[0] * 1e9))
    queue = venturi.Queue(schema, dsn=server_log.dsn)
    producer = venturi.Queue(schema, dsn=dsn)
    began = Began(queue)
    with working(queue, poll=60):
        for _ in range(2):
            sent = time.monotonic()
            job = producer.enqueue(Ping(), delay=dt.timedelta(milliseconds=300)).id
            assert 0.25 < began.wait(job) - sent < 0.8
            wrong[0] = -wrong[0]
        server_log.clear()
        time.sleep(0.5)
        assert len(server_log.statements(CLAIM)) < 20
    producer.close()
    queue.close()


@pytest.mark.conformance(174)
def test_a_worker_beside_locked_jobs_tries_again_and_does_not_park(
    schema: str, server_log: ServerLog, dsn: str, connect: Connect, observer: psycopg.Connection[t.Any]
) -> None:
    """Every 50 to 100 ms, until they are gone or free."""
    queue = venturi.Queue(schema, dsn=server_log.dsn)
    producer = venturi.Queue(schema, dsn=dsn)
    began = Began(queue)
    job = producer.enqueue(Ping()).id
    with connect() as holder:
        holder.execute(on(schema, "SELECT FROM {schema}.live FOR UPDATE"))
        with working(queue, poll=60):
            time.sleep(0.3)
            server_log.clear()
            time.sleep(1)
            tries = len(server_log.statements(CLAIM))
            # A look that finds only locked jobs is repeated once with open quotas.
            assert 2 * 8 <= tries <= 2 * 21
            assert parked_sessions(observer) == 0
            assert job not in began.at
            holder.rollback()
            released = time.monotonic()
            assert began.wait(job) - released < 0.25
    producer.close()
    queue.close()


def parked_sessions(connection: psycopg.Connection[t.Any]) -> int:
    query = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock' AND granted"
    return int(connection.execute(query).fetchall()[0][0])


@pytest.mark.conformance(175)
@pytest.mark.parametrize("options", [{"notify": False}, {"listen_dsn": "host=127.0.0.1 port=1"}], ids=["off", "deaf"])
def test_polling_alone_is_enough(schema: str, dsn: str, options: dict[str, t.Any], producer: venturi.Queue) -> None:
    """With notifications off, or a listener that never connects, a job is found within the poll interval (case 114)."""
    queue = venturi.Queue(schema, dsn=dsn, **options)
    began = Began(queue)
    with working(queue, poll=0.4):
        began.wait(producer.enqueue(Ping()).id)
        time.sleep(0.2)
        for _ in range(3):
            sent = time.monotonic()
            assert began.wait(producer.enqueue(Ping()).id) - sent < 0.4 + 0.25
    queue.close()


@pytest.mark.conformance(176)
def test_a_burst_of_enqueues_during_one_claim_costs_one_more_claim(
    schema: str,
    dsn: str,
    server_log: ServerLog,
    producer: venturi.Queue,
    proxy: Proxy,
    observer: psycopg.Connection[t.Any],
) -> None:
    """A thousand notifications while a claim is on its way are one call to look again; a job after them is found.

    Case 108.
    """
    held = conninfo.make_conninfo(proxy.dsn, options="-c log_statement=all")
    queue = venturi.Queue(schema, dsn=held, listen_dsn=dsn)
    began = Began(queue)
    with working(queue, poll=0.5, lease=60):
        parked(observer)
        proxy.hold()
        time.sleep(0.6)  # the poll's claim is on its way now
        producer.enqueue_many([Pong() for _ in range(500)])
        for _ in range(500):
            producer.enqueue(Pong())
        server_log.clear()
        proxy.resume()
        time.sleep(0.3)
        assert len(server_log.statements(CLAIM)) <= 2
        began.wait(producer.enqueue(Ping()).id)
    queue.close()


@pytest.mark.conformance(180)
def test_enqueues_in_another_queue_wake_nobody_here(dsn: str, server_log: ServerLog, connect: Connect) -> None:
    """Not even where the two names share their first 60 bytes (case 112)."""
    stem = f"twin_{uuid.uuid4().hex}_" + "x" * 40
    names = [stem[:60] + "one", stem[:60] + "two"]
    queue, other = venturi.Queue(names[0], dsn=server_log.dsn), venturi.Queue(names[1], dsn=dsn)
    began = Began(queue)
    with connect(autocommit=True) as connection:
        try:
            for name in names:
                migrate.migrate(dsn, name)
            with working(queue, poll=60):
                parked(connection)
                time.sleep(0.3)
                server_log.clear()
                for number in range(20):
                    other.enqueue(Ping(number))
                time.sleep(0.3)
                assert server_log.statements(CLAIM) == []
                queue.enqueue(Ping())
                eventually(lambda: began.at)
        finally:
            queue.close()
            other.close()
            for name in names:
                connection.execute(on(name, "DROP SCHEMA IF EXISTS {schema} CASCADE"))


@pytest.mark.conformance(181)
def test_an_idle_worker_asks_little_and_says_nothing(
    schema: str,
    server_log: ServerLog,
    observer: psycopg.Connection[t.Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Fewer than 40 statements a minute at default settings; every interval, and so the minute, is a fortieth here.

    Cases 097, 173.
    """
    caplog.set_level(logging.INFO)
    defaults = Settings.of({})
    monkeypatch.setattr(listener, "PING_SECONDS", listener.PING_SECONDS / 40)
    queue = venturi.Queue(schema, dsn=server_log.dsn)
    Began(queue)
    with working(queue, concurrency=defaults.concurrency, lease=defaults.lease / 40, poll=defaults.poll / 40):
        parked(observer)
        time.sleep(0.3)
        server_log.clear()
        time.sleep(60 / 40)
        assert 10 < len(server_log.statements()) < 40
    assert [record for record in caplog.records if record.levelno >= logging.INFO] == []
    queue.close()


@pytest.mark.conformance(265)
def test_a_prepared_transaction_is_found_by_polling_once_it_is_committed(
    queue: venturi.Queue, began: Began, connect: Connect
) -> None:
    """With notify=False an enqueue can be part of a two-phase commit; the worker sees it at its next look."""
    with connect() as connection, working(queue, poll=0.3):
        connection.tpc_begin(connection.xid(1, f"venturi-{queue.schema}", "test"))
        job = queue.enqueue(Ping(), conn=connection, notify=False).id
        connection.tpc_prepare()
        time.sleep(0.2)
        assert job not in began.at
        connection.tpc_commit()
        committed = time.monotonic()
        assert began.wait(job) - committed < 0.3 + 0.25
        ended(queue, job)
