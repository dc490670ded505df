"""Where an enqueue goes when the caller gives no connection: the queue's own, after restarts and forks too."""

from __future__ import annotations

import collections.abc as cabc
import os
import signal
import subprocess
import sys
import threading
import time
import typing as t
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from fixtures.nowhere import NOWHERE
from fixtures.plain import Keyed, Plain, both
from fixtures.proxy import Proxy
from fixtures.waiting import eventually
from fixtures.work import ended, working
from psycopg import sql

import venturi
from venturi.store import connections, pool

Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[t.Any]]


@pytest.fixture
def schema(emptied: str) -> str:
    """One schema for all tests here, emptied after each."""
    return emptied


@pytest.mark.conformance(36, 46)
@both
def test_a_schema_that_was_never_migrated_is_named(dsn: str, task: t.Any) -> None:
    """On the queue's own connection a missing schema says what to do, with psycopg's error as its cause (case 154)."""
    queue = venturi.Queue("never_migrated", dsn=dsn)
    for enqueue in (lambda: queue.enqueue(task), lambda: queue.enqueue_many([task]), queue.jobs):
        with pytest.raises(venturi.SchemaError, match="`venturi migrate --schema never_migrated`") as caught:
            enqueue()
        assert isinstance(caught.value.__cause__, psycopg.Error)
        assert str(caught.value.__cause__.diag.message_primary) in str(caught.value)
    queue.close()


@pytest.mark.conformance(36)
def test_other_errors_of_psycopg_pass_unchanged(queue: venturi.Queue, connect: Connect) -> None:
    """What the server refuses on the queue's own connection comes as psycopg's own error."""
    jobs = sql.Identifier(queue.schema, "jobs")
    operator = connect(autocommit=True)
    operator.execute(sql.SQL("ALTER TABLE {} ADD CONSTRAINT no_plain CHECK (kind <> 'plain')").format(jobs))
    with pytest.raises(psycopg.errors.CheckViolation):
        queue.enqueue(Plain())
    operator.execute(sql.SQL("ALTER TABLE {} DROP CONSTRAINT no_plain").format(jobs))


@pytest.mark.conformance(47)
@both
def test_an_enqueue_after_a_restart_succeeds(queue: venturi.Queue, connect: Connect, task: t.Any) -> None:
    """A full pool of connections that the server has closed meanwhile is replaced without delay."""
    _fill(queue, 10)
    closed = connect(autocommit=True).execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = 'venturi producer'"
    )
    assert closed.fetchall() == [(True,)] * 10
    before = time.monotonic()
    queue.enqueue(task)
    queue.enqueue_many([task])
    assert time.monotonic() - before < 2


@pytest.mark.conformance(47)
def test_a_connection_that_was_cut_is_not_used(schema: str, proxy: Proxy) -> None:
    """The same holds when the network has closed the connection."""
    queue = venturi.Queue(schema, dsn=proxy.dsn)
    queue.enqueue(Plain())
    proxy.cut()
    eventually(lambda: queue.enqueue(Plain()), what="enqueue after the cut")
    queue.close()


def test_what_a_signal_handler_raises_ends_an_enqueue_at_once(queue: venturi.Queue, connect: Connect) -> None:
    """A soft timeout is no wait for the lock that another transaction holds, and the next enqueue works (case 124)."""

    class SoftTimeout(Exception):
        pass

    def expire(*_: object) -> None:
        raise SoftTimeout

    holder = connect()
    queue.enqueue(Keyed("a"), conn=holder)
    before = time.monotonic()
    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(SoftTimeout):
            queue.enqueue(Keyed("a"))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert time.monotonic() - before < 3
    holder.rollback()
    assert queue.enqueue(Keyed("a")).action == "inserted"


@pytest.mark.conformance(48)
@pytest.mark.parametrize(("size", "most"), [(3, 3), (None, 10)])
def test_a_queue_opens_no_more_connections_than_it_may(
    schema: str, dsn: str, connect: Connect, monkeypatch: pytest.MonkeyPatch, size: int | None, most: int
) -> None:
    """With all connections busy an enqueue raises when it has waited for one, and the next one works (case 120)."""
    assert pool.POOL_SECONDS + connections.CONNECT_SECONDS / 2 <= 15
    monkeypatch.setattr(pool, "POOL_SECONDS", 0.3)
    queue = venturi.Queue(schema, dsn=dsn) if size is None else venturi.Queue(schema, dsn=dsn, pool_size=size)
    observer = connect(autocommit=True)

    def with_all_busy() -> None:
        with pytest.raises(psycopg.OperationalError):
            queue.enqueue(Plain())
        count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'venturi producer'"
        assert observer.execute(count).fetchone() == (most,)

    _fill(queue, most, with_all_busy)
    queue.enqueue(Plain())
    queue.close()


@pytest.mark.conformance(48)
def test_an_unreachable_server_is_an_error_in_good_time(
    schema: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that refuses, or that takes the connection and says nothing, makes the enqueue raise and say why."""
    monkeypatch.setattr(pool, "POOL_SECONDS", 0.3)
    silent = venturi.Queue(schema, dsn=proxy.dsn)
    proxy.hold()
    refused = venturi.Queue(schema, dsn=NOWHERE)
    with pytest.raises(psycopg.OperationalError, match="refused") as told:
        refused.enqueue(Plain())
    assert isinstance(told.value.__cause__, psycopg.OperationalError)
    with pytest.raises(psycopg.OperationalError):
        silent.enqueue(Plain())
    refused.close()
    proxy.resume()
    eventually(lambda: _enqueued(silent), what="the server is back")
    silent.close()


@pytest.mark.slow
def test_handlers_enqueue_through_a_pool_of_one(schema: str, dsn: str) -> None:
    """Eight handlers share its connection; the worker needs none of it, not even while it is taken (case 120)."""
    queue, producer = venturi.Queue(schema, dsn=dsn, pool_size=1), venturi.Queue(schema, dsn=dsn)

    @queue.handler
    def plain(task: Plain) -> None:
        if task.value:
            queue.enqueue_many([Plain(task.value - 1)] * 2)
            queue.enqueue(Plain(task.value - 1))

    with working(queue, concurrency=8, lease=1):
        producer.enqueue_many([Plain(2)] * 8)
        eventually(lambda: producer.stats().kinds == {})
        _fill(queue, 1, lambda: ended(producer, producer.enqueue(Plain()).id))
    jobs = producer.jobs(kind="plain", limit=1000)
    assert [job.run_count for job in jobs] == [1] * (8 * (1 + 3 + 9) + 1)
    queue.close()
    producer.close()


FORKING = """
import os, sys, warnings
import venturi

warnings.simplefilter("ignore", DeprecationWarning)

@venturi.task("plain")
class Plain:
    value: int = 0

queue = venturi.Queue(sys.argv[1], dsn=sys.argv[2])
queue.enqueue(Plain(0))
child = os.fork()
for _ in range(20):
    queue.enqueue(Plain(1 if child else 2))
if child:
    _, status = os.waitpid(child, 0)
    queue.enqueue(Plain(1))
    queue.close()
    sys.exit(os.waitstatus_to_exitcode(status))
queue.close()
"""


@pytest.mark.conformance(49)
def test_parent_and_child_of_a_fork_go_on_enqueuing(queue: venturi.Queue, dsn: str, tmp_path: Path) -> None:
    """A queue that was used before os.fork() opens connections of its own in the child and keeps the parent's.

    Case 134.
    """
    _python(tmp_path, FORKING, queue.schema, dsn)
    values = [job.payload["value"] for job in queue.jobs()]
    assert [values.count(n) for n in range(3)] == [1, 21, 20]


PRODUCING = """
import sys
import tasks

tasks.queue.enqueue(tasks.Welcome(7))
tasks.queue.close()
assert "handlers" not in sys.modules
"""

TASKS_MODULE = """
import os
import venturi

queue = venturi.Queue(os.environ["SCHEMA"], dsn=os.environ["DSN"])

@venturi.task("mail.welcome")
class Welcome:
    user_id: int
"""


@pytest.mark.conformance(11)
def test_a_producer_needs_the_task_classes_only(
    queue: venturi.Queue, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Enqueuing from a module of task classes imports no handlers and needs no setting of a worker."""
    (tmp_path / "tasks.py").write_text(TASKS_MODULE)
    (tmp_path / "handlers.py").write_text("raise ImportError('a producer has no handlers')")
    monkeypatch.setenv("SCHEMA", queue.schema)
    monkeypatch.setenv("DSN", dsn)
    _python(tmp_path, PRODUCING)
    assert [job.payload for job in queue.jobs(kind="mail.welcome")] == [{"user_id": 7}]


def _python(folder: Path, script: str, *arguments: str) -> None:
    (folder / "script.py").write_text(script)
    path = os.pathsep.join([str(folder), str(Path(venturi.__file__).parents[1])])
    command = [sys.executable, str(folder / "script.py"), *arguments]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr


def _fill(queue: venturi.Queue, number: int, meanwhile: cabc.Callable[[], object] = lambda: None) -> None:
    """Use that many connections of the queue's pool at once, and do something while all of them are in use."""
    entered, left = threading.Barrier(number + 1), threading.Barrier(number + 1)

    @venturi.task("slow")
    class Slow:
        key: int

        def dedup_key(self) -> int:
            return self.key

        def merge(self, existing: venturi.Pending[Slow]) -> venturi.Merge[Slow]:
            entered.wait(5)
            left.wait(5)
            return venturi.Keep()

    queue.enqueue_many([Slow(n) for n in range(number)])
    with ThreadPoolExecutor(number) as pool:
        busy = [pool.submit(queue.enqueue, Slow(n)) for n in range(number)]
        entered.wait(5)
        meanwhile()
        left.wait(5)
        assert {future.result(5).action for future in busy} == {"kept"}


def _enqueued(queue: venturi.Queue) -> bool:
    try:
        queue.enqueue(Plain())
    except psycopg.OperationalError:
        return False
    return True
