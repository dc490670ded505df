"""Workers and a database that goes away: they wait, come back by themselves, and run nothing twice."""

from __future__ import annotations

import collections.abc as cabc
import logging
import os
import socket
import threading
import time
import typing as t
import uuid

import psycopg
import pytest
from fixtures.database import SETTINGS
from fixtures.proxy import Proxy
from fixtures.sqltext import on
from fixtures.waiting import eventually
from fixtures.work import ended, parked, until, working

import venturi
from venturi import embedded
from venturi.store import migrate
from venturi.worker.outages import Outages, Retry

Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[t.Any]]


@venturi.task("work")
class Work:
    number: int = 0


@pytest.fixture(scope="module")
def own_server() -> cabc.Iterator[embedded.Server]:
    """A server that may be stopped and started without harm to the other tests."""
    with embedded.server(settings=SETTINGS) as server:
        yield server


@pytest.fixture
def own(own_server: embedded.Server) -> cabc.Iterator[venturi.Queue]:
    """A queue on that server, with a handler that does nothing."""
    own_server.start()
    schema = f"queue_{uuid.uuid4().hex[:12]}"
    migrate.migrate(own_server.dsn, schema)
    queue = venturi.Queue(schema, dsn=own_server.dsn)
    yield queue
    own_server.start()
    queue.close()


class Runs:
    """Runs that wait to be let go, and the jobs that they belong to."""

    def __init__(self, *queues: venturi.Queue) -> None:
        self.began = threading.Semaphore(0)
        self.go = threading.Event()
        self.jobs: list[uuid.UUID] = []
        for queue in queues:
            queue.handler(self._handle)

    def _handle(self, task: Work, ctx: venturi.Context) -> None:
        self.jobs.append(ctx.id)
        self.began.release()
        if task.number:
            self.go.wait(20)

    def await_begun(self, count: int) -> None:
        for _ in range(count):
            assert self.began.acquire(timeout=5)


@pytest.mark.conformance(195, 196, 178)
def test_a_worker_goes_on_after_a_restart_of_the_server(
    own: venturi.Queue, own_server: embedded.Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Without help, its running job settled, its listener back at once, and one line at each end of the outage.

    Cases 104, 117, 173.
    """
    caplog.set_level(logging.INFO)
    runs = Runs(own)
    with working(own, poll=60):
        running = own.enqueue(Work(1)).id
        runs.await_begun(1)
        own_server.stop()
        runs.go.set()
        eventually(lambda: caplog.records, what="the outage is logged")
        time.sleep(1)
        own_server.start()
        began = time.monotonic()
        with psycopg.connect(own_server.dsn, autocommit=True) as connection:
            ended(own, running, timeout=3)
            parked(connection)
        assert time.monotonic() - began < 3
        other = venturi.Queue(own.schema, dsn=own_server.dsn)
        ended(other, other.enqueue(Work()).id, timeout=1)
        other.close()
    assert runs.jobs.count(running) == 1
    lines = [record.getMessage() for record in caplog.records if record.name == "venturi.worker"]
    assert len(lines) == 2
    assert "database trouble" in lines[0]
    assert "over" in lines[1]


@pytest.mark.conformance(198)
def test_a_worker_that_starts_while_the_server_is_down_waits_for_it(
    own: venturi.Queue, own_server: embedded.Server
) -> None:
    """It begins to work as soon as the server does (cases 106, 117)."""
    runs = Runs(own)
    job = own.enqueue(Work()).id
    own.close()
    own_server.stop("immediate")
    with working(own):
        time.sleep(0.3)
        assert runs.jobs == []
        own_server.start()
        ended(own, job)


@pytest.mark.conformance(182, 198)
def test_a_stop_during_an_outage_is_prompt(own: venturi.Queue, own_server: embedded.Server) -> None:
    """A worker with nothing in flight ends at once, one that never reached the server too (case 104)."""
    Runs(own)
    with working(own) as worker:
        eventually(lambda: own.stats().workers == 1)
        own_server.stop()
        with working(own) as other:
            time.sleep(0.3)
            began = time.monotonic()
            for each in (worker, other):
                each.stop()
                assert each.join(2) == venturi.Report(0)
            assert time.monotonic() - began < 1


@pytest.mark.conformance(198)
@pytest.mark.parametrize("block", [True, False])
def test_a_worker_on_a_missing_schema_raises_at_once(dsn: str, block: bool) -> None:
    """SchemaError names the command that makes it (case 154)."""
    queue = venturi.Queue("never_made", dsn=dsn)
    Runs(queue)
    began = time.monotonic()
    with pytest.raises(venturi.SchemaError, match="venturi migrate"):
        queue.work(block=t.cast(t.Any, block), signals=False)
    assert time.monotonic() - began < 1.5
    queue.close()


@pytest.mark.conformance(198)
def test_a_worker_on_a_schema_of_the_future_raises_at_once(queue: venturi.Queue, connect: Connect) -> None:
    """A schema whose oldest library is newer than this one is left alone (case 159)."""
    Runs(queue)
    with connect(autocommit=True) as connection:
        connection.execute(
            on(queue.schema, "INSERT INTO {schema}.versions (version, oldest_library) VALUES (999, 999)")
        )
    with pytest.raises(venturi.SchemaError, match="999"):
        queue.work(block=False)


@pytest.mark.conformance(197)
def test_handlers_that_run_through_an_outage_are_settled_and_none_runs_twice(
    schema: str, dsn: str, proxy: Proxy
) -> None:
    """Two workers lose the server for less than two thirds of a lease; neither takes what the other still runs."""
    one, two = venturi.Queue(schema, dsn=proxy.dsn), venturi.Queue(schema, dsn=proxy.dsn)
    observer = venturi.Queue(schema, dsn=dsn)
    runs = Runs(one, two)
    with working(one, lease=3), working(two, lease=3):
        jobs = [observer.enqueue(Work(1)).id for _ in range(4)]
        runs.await_begun(4)
        eventually(lambda: observer.stats().workers == 2)
        proxy.refuse()
        proxy.cut()
        time.sleep(1.6)
        runs.go.set()
        proxy.resume()
        for job in jobs:
            until(observer, job, "completed")
    assert sorted(runs.jobs) == sorted(jobs)
    for queue in (one, two, observer):
        queue.close()


@pytest.mark.conformance(157, 196)
def test_a_worker_that_drains_renews_again_as_soon_as_the_database_is_back(
    schema: str, dsn: str, proxy: Proxy, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the coordinator, to which the maintainer leaves the trying, has nothing to settle (cases 067, 106)."""
    failures, began = list[str](), Outages.began

    def noted(this: Outages, part: str, *arguments: t.Any) -> None:
        began(this, part, *arguments)
        failures.append(part)

    monkeypatch.setattr(Outages, "began", noted)
    queue, observer = venturi.Queue(schema, dsn=proxy.dsn), venturi.Queue(schema, dsn=dsn)
    runs = Runs(queue)
    job = observer.enqueue(Work(1)).id
    with working(queue, lease=2) as worker:
        runs.await_begun(1)
        eventually(lambda: observer.stats().workers == 1)
        parked(connect(autocommit=True))
        proxy.refuse()
        proxy.cut()
        eventually(lambda: {"coordinator", "maintainer"} <= set(failures))
        tries = failures.count("listener")
        worker.stop()
        eventually(lambda: failures.count("listener") > tries, what="the listener, which leaves, has tried in vain")
        before = observer.job(job)
        proxy.resume()
        assert before is not None

        def renewed() -> bool:
            found = observer.job(job)
            return found is not None and found.lease_until != before.lease_until

        eventually(renewed, 2)
        runs.go.set()
    assert [entry.outcome for entry in observer.journal(job)] == ["completed"]
    queue.close()
    observer.close()


@pytest.mark.conformance(195)
def test_an_error_in_any_statement_of_a_worker_does_not_end_it(
    queue: venturi.Queue, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """Claim, settle, renewal and recovery all fail while a table is gone, and go on when it is back (case 117)."""
    runs = Runs(queue)
    with working(queue, lease=1.5, poll=0.05), connect(autocommit=True) as connection:
        running = queue.enqueue(Work(1)).id
        runs.await_begun(1)
        connection.execute(on(queue.schema, "ALTER TABLE {schema}.live RENAME TO gone"))
        runs.go.set()
        time.sleep(0.8)
        connection.execute(on(queue.schema, "ALTER TABLE {schema}.gone RENAME TO live"))
        ended(queue, running)
        ended(queue, queue.enqueue(Work()).id)
    assert runs.jobs.count(running) == 1
    assert "database trouble" in caplog.text


@pytest.mark.conformance(196)
def test_the_waits_double_from_a_tenth_of_a_second_to_five() -> None:
    """Each is shortened at random, so that workers that lost the server together do not come back together."""
    retry = Retry(0.1, 5.0)
    waits = [retry.wait() for _ in range(10)]
    for wait, full in zip(waits, [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 5, 5], strict=True):
        assert 0.9 * full <= wait <= full
    assert len(set(waits)) == 10
    retry.reset()
    assert retry.wait() <= 0.1


@pytest.mark.conformance(196)
def test_an_outage_of_a_minute_costs_a_worker_few_attempts(
    schema: str, proxy: Proxy, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its threads together make at most 30; a minute is three seconds here, as all waits are a twentieth.

    Cases 107, 173.
    """
    monkeypatch.setattr("venturi.worker.threads.FOLLOWING", 15 / 20)
    whole = Retry.wait

    def twentieth(retry: Retry) -> float:
        return whole(retry) / 20

    monkeypatch.setattr(Retry, "wait", twentieth)
    queue = venturi.Queue(schema, dsn=proxy.dsn)
    Runs(queue)
    attempts = list[float]()
    connect = psycopg.Connection.connect.__func__  # type: ignore[attr-defined]

    def counted(cls: t.Any, *arguments: t.Any, **options: t.Any) -> t.Any:
        attempts.append(time.monotonic())
        return connect(cls, *arguments, **options)

    with working(queue, poll=0.05):
        eventually(lambda: queue.stats().workers == 1)
        monkeypatch.setattr(psycopg.Connection, "connect", classmethod(counted))
        files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        proxy.refuse()
        proxy.cut()
        time.sleep(60 / 20)
        assert 10 < len(attempts) <= 30
        assert len(os.listdir("/proc/self/fd")) <= files
        assert threading.active_count() <= threads
        proxy.resume()
        eventually(lambda: "over" in caplog.text)
    assert [r.levelname for r in caplog.records if r.name == "venturi.worker"] == ["WARNING", "WARNING"]
    queue.close()


@pytest.mark.parametrize(
    "name", ["", "b\u00e4r", "h" * 300, "a\0\udce4"], ids=["empty", "umlaut", "long", "unstorable"]
)
def test_workers_of_one_name_and_pid_are_told_apart(
    schema: str, dsn: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As in containers: what one settles, renews and gives back is its own, whatever the host is called (case 065)."""
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    queue = venturi.Queue(schema, dsn=dsn)
    go = threading.Event()
    began = threading.Semaphore(0)

    @queue.handler
    def work(task: Work) -> None:
        began.release()
        assert go.wait(10)

    with working(queue, concurrency=1, lease=1) as one:
        first = queue.enqueue(Work()).id
        assert began.acquire(timeout=5)
        with working(queue, concurrency=1, lease=1, shutdown_timeout=0):
            second = queue.enqueue(Work()).id
            assert began.acquire(timeout=5)
        job = queue.job(first)
        assert job is not None
        assert (job.status, job.owner) == ("claimed", one.id)
        go.set()
        for id_ in (first, second):
            ended(queue, id_)
    assert [entry.outcome for entry in queue.journal(first)] == ["completed"]
    assert [entry.outcome for entry in queue.journal(second)] == ["released", "completed"]
    queue.close()


@pytest.mark.conformance(199, 200)
def test_every_worker_has_a_row_of_its_own_with_a_fresh_heartbeat(queue: venturi.Queue, connect: Connect) -> None:
    """Two of one process share host and pid and nothing else; rows that were silent for ten leases are removed."""

    Runs(queue)
    with connect(autocommit=True) as connection:
        rows = on(queue.schema, "SELECT id, host, pid, slots, kinds, now() - seen_at AS age FROM {schema}.workers")
        silent = uuid.uuid4()
        connection.execute(
            on(
                queue.schema,
                """INSERT INTO {schema}.workers
                SELECT id, 'h', 1, 1, ARRAY['x'], interval '1 s', now(), now() - seen FROM (VALUES
                  (%s::uuid, interval '11 s'), (%s, interval '9 s')) v(id, seen)""",
            ),
            [silent, alive := uuid.uuid4()],
        )
        with working(queue, lease=1.5, concurrency=1) as one, working(queue, lease=1.5, concurrency=3) as two:
            eventually(lambda: len(connection.execute(rows).fetchall()) == 3)
            time.sleep(0.8)
            found = {id_: rest for id_, *rest in connection.execute(rows)}
            assert silent not in found
            assert {one.id, two.id} == set(found) - {alive}
            for worker, slots in ((one, 1), (two, 3)):
                host, pid, slots_, kinds, age = found[worker.id]
                assert (host, pid, slots_, kinds) == (socket.gethostname(), os.getpid(), slots, ["work"])
                assert age.total_seconds() < 0.5 + 1


def test_a_session_that_died_in_an_outage_is_no_outage_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """A part that finds its session dead only after the others have recovered reconnects without a word."""
    outages = Outages("worker")
    opened = time.monotonic()
    error = psycopg.OperationalError()
    outages.began("coordinator", error, opened)
    outages.ended("coordinator")
    outages.began("maintainer", error, opened)
    outages.ended("maintainer")
    assert len(caplog.records) == 2
    outages.began("maintainer", error, time.monotonic())
    outages.ended("maintainer")
    assert len(caplog.records) == 4
    outages.began("listener", error, opened)
    outages.began("listener", error)
    assert len(caplog.records) == 5


def test_every_loss_of_a_session_is_told_though_it_was_opened_in_an_outage(caplog: pytest.LogCaptureFixture) -> None:
    """The session that ended the last outage is older than its end; when it is lost, that is another outage."""
    outages = Outages("worker")
    for _ in range(3):
        outages.began("coordinator", psycopg.OperationalError())
        opened = time.monotonic()
        outages.ended("coordinator")
        outages.began("coordinator", psycopg.OperationalError(), opened)
        outages.ended("coordinator")
    assert len(caplog.records) == 12
