"""An enqueue in the caller's transaction: there when it commits, gone when it rolls back, and in nobody's way."""

from __future__ import annotations

import collections.abc as cabc
import os
import subprocess
import sys
import threading
import time
import typing as t
from pathlib import Path

import psycopg
import pytest
from fixtures.statements import Bell, traced
from fixtures.work import ended, parked, working

import venturi

Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[t.Any]]

MINUTE = 60.0


@venturi.task("plain")
class Plain:
    text: str = ""


@venturi.task("keyed")
class Keyed:
    key: str
    number: int = 0

    def dedup_key(self) -> str:
        return self.key

    def merge(self, existing: venturi.Pending[Keyed]) -> venturi.Merge[Keyed]:
        if self.number < 0:
            raise LookupError("no merge")
        return venturi.Combine(Keyed(self.key, existing.task.number + self.number))


@venturi.task("decided")
class Decided:
    decision: str

    def dedup_key(self) -> str:
        return "k"

    def merge(self, existing: venturi.Pending[Decided]) -> venturi.Merge[Decided]:
        decisions: dict[str, venturi.Merge[Decided]] = {
            "keep": venturi.Keep(),
            "replace": venturi.Replace(),
            "combine": venturi.Combine(existing.task),
            "independent": venturi.Independent(),
        }
        return decisions[self.decision]


@pytest.fixture
def schema(emptied: str) -> str:
    """One schema for all tests here, emptied after each."""
    return emptied


@pytest.mark.conformance(50)
def test_a_job_exists_if_and_only_if_the_caller_commits(queue: venturi.Queue, connect: Connect, schema: str) -> None:
    """What a transaction enqueues comes with its commit; a rollback leaves neither job, entry nor wake-up.

    Cases 039, 040.
    """
    bell = Bell(connect(autocommit=True), schema)
    with connect() as caller:
        gone = queue.enqueue(Plain(), conn=caller)
        merged = queue.enqueue_many([Keyed("a", 1), Keyed("a", 1)], conn=caller)
        assert queue.job(gone.id) is None
        caller.rollback()
        assert queue.jobs() == []
        assert queue.journal(merged[0].id) == []
        assert bell.rings() == 0
        kept = queue.enqueue(Plain(), conn=caller)
    assert [job.id for job in queue.jobs()] == [kept.id]
    assert bell.rings() == 1


@pytest.mark.conformance(50)
@pytest.mark.parametrize("task", [Plain(), Keyed("a")], ids=["plain", "keyed"])
def test_a_savepoint_that_rolls_back_drops_only_its_own_jobs(
    queue: venturi.Queue, connect: Connect, task: object
) -> None:
    """A nested block that rolls back takes its jobs and merges along; those around it stay (cases 039, 040)."""
    with connect() as caller:
        first = queue.enqueue(Keyed("a", 1), conn=caller)
        with caller.transaction() as inner:
            queue.enqueue(task, conn=caller)
            queue.enqueue(Keyed("b"), conn=caller)
            raise psycopg.Rollback(inner)
        second = queue.enqueue(Keyed("b", 1), conn=caller)
        assert second.action == "inserted"
    assert {job.id for job in queue.jobs()} == {first.id, second.id}
    assert queue.journal(first.id) == []


@pytest.mark.conformance(52)
def test_a_refused_enqueue_leaves_the_callers_transaction_usable(queue: venturi.Queue, connect: Connect) -> None:
    """Whatever an enqueue raises of its own, what the caller wrote before and writes afterwards is committed.

    Case 001.
    """
    with connect() as caller:
        caller.execute("CREATE TEMP TABLE mine (n int) ON COMMIT PRESERVE ROWS")
        first = queue.enqueue(Keyed("a", 1), conn=caller)
        with pytest.raises(venturi.PayloadError):
            queue.enqueue(Plain("\0"), conn=caller)
        with pytest.raises(venturi.ConfigError):
            queue.enqueue(Plain(), conn=caller, priority=t.cast(venturi.Priority, 7))
        with pytest.raises(LookupError):
            queue.enqueue(Keyed("a", -1), conn=caller)
        caller.execute("INSERT INTO mine VALUES (1)")
        second = queue.enqueue(Keyed("a", 1), conn=caller)
        caller.commit()
        assert caller.execute("SELECT count(*) FROM mine").fetchone() == (1,)
    assert second == venturi.Receipt(first.id, "combined")
    assert [job.id for job in queue.jobs()] == [first.id]


@pytest.mark.conformance(52)
def test_a_pending_key_sends_no_statement_that_fails(queue: venturi.Queue, connect: Connect) -> None:
    """A duplicate is looked for, not run into: nothing fails, nothing reaches the server's log (case 038)."""
    with connect() as caller:
        queue.enqueue(Keyed("a", 1), conn=caller)
        with traced(caller) as sent:
            queue.enqueue(Keyed("a", 1), conn=caller)
            queue.enqueue_many([Keyed("a", 1), Keyed("a", 1)], conn=caller)
    assert sent.errors == 0
    assert sent.statements > 0


@pytest.mark.conformance(52)
@pytest.mark.parametrize("decision", ["keep", "replace", "combine", "independent"])
def test_a_pending_key_is_no_error_in_the_callers_transaction(
    queue: venturi.Queue, connect: Connect, decision: str
) -> None:
    """Whatever merge() decides, no statement fails, and all that the caller wrote commits with it (case 038)."""
    first = queue.enqueue(Decided(decision))
    with connect() as caller:
        caller.execute("CREATE TEMP TABLE mine (n int)")
        with traced(caller) as sent, caller.transaction():
            caller.execute("INSERT INTO mine VALUES (1)")
            second = queue.enqueue(Decided(decision), conn=caller)
            caller.execute("INSERT INTO mine VALUES (2)")
        assert sent.errors == 0
        assert caller.execute("SELECT count(*) FROM mine").fetchone() == (2,)
    assert (second.id == first.id) is (decision != "independent")
    assert len(queue.jobs()) == (2 if decision == "independent" else 1)


@pytest.mark.parametrize("task", [Plain(), Keyed("a")], ids=["plain", "keyed"])
def test_a_failed_transaction_is_not_escaped(queue: venturi.Queue, connect: Connect, task: object) -> None:
    """On a transaction that has failed the driver's error comes through; nothing goes by another way (case 045)."""
    caller = connect()
    with pytest.raises(psycopg.errors.DivisionByZero):
        caller.execute("SELECT 1 / 0")
    with pytest.raises(psycopg.errors.InFailedSqlTransaction):
        queue.enqueue(task, conn=caller)
    caller.rollback()
    assert queue.jobs() == []


@pytest.mark.conformance(36)
@pytest.mark.parametrize("task", [Plain(), Keyed("a")], ids=["plain", "keyed"])
def test_a_broken_connection_is_not_replaced(queue: venturi.Queue, connect: Connect, task: object) -> None:
    """On a connection that the server has closed psycopg's error comes through; nothing goes by another way.

    Case 045.
    """
    caller = connect()
    caller.execute("SELECT 1")
    connect(autocommit=True).execute("SELECT pg_terminate_backend(%s, 5000)", (caller.info.backend_pid,))
    with pytest.raises(psycopg.OperationalError):
        queue.enqueue(task, conn=caller)
    assert queue.jobs() == []


@pytest.mark.conformance(36)
def test_a_missing_schema_on_the_callers_connection_is_psycopgs_error(dsn: str, connect: Connect) -> None:
    """On the caller's connection errors pass unchanged, that of a schema that is not there included."""
    missing = venturi.Queue("never_migrated", dsn=dsn)
    with pytest.raises(psycopg.errors.UndefinedTable):
        missing.enqueue(Plain(), conn=connect())


@pytest.mark.conformance(56)
def test_a_worker_of_another_process_starts_after_the_commit(
    queue: venturi.Queue, connect: Connect, dsn: str, schema: str, tmp_path: Path
) -> None:
    """A worker that sleeps for a minute does not see the job before the commit, and starts it within 250 ms after.

    Cases 031, 040.
    """
    observer = connect(autocommit=True)
    with other_process(tmp_path, schema, dsn):
        parked(observer)
        with connect() as caller:
            receipt = queue.enqueue(Plain(), conn=caller)
            assert queue.job(receipt.id) is None
            time.sleep(0.3)  # long enough for a worker that was woken too early to find nothing and sleep again
            before = time.time()
        ended(queue, receipt.id)
    entry = queue.journal(receipt.id)[-1]
    assert entry.recorded_at.timestamp() - before < 0.25


@pytest.mark.conformance(57)
@pytest.mark.slow
def test_no_mark_hides_a_job_that_commits_late(queue: venturi.Queue, connect: Connect) -> None:
    """A job whose transaction stays open while others of its lane run starts within 2 s of the commit."""
    stop = threading.Event()

    @queue.handler
    def plain(task: Plain) -> None:
        pass

    def busy() -> None:
        while not stop.is_set():
            queue.enqueue_many([Plain("other")] * 20)
            time.sleep(0.01)

    producer = threading.Thread(target=busy)
    with working(queue, concurrency=4):
        with connect() as caller:
            late = queue.enqueue(Plain("late"), conn=caller)
            producer.start()
            time.sleep(4)  # marks follow a second or two behind, so that they have passed it long ago
        before = time.time()
        ended(queue, late.id)
        stop.set()
        producer.join()
    assert queue.journal(late.id)[-1].recorded_at.timestamp() - before < 2


class other_process:  # noqa: N801 - used like a function
    """A worker of the task `Plain`, asleep for up to a minute, in a process of its own for the time of the block."""

    SCRIPT = """
import sys, venturi

@venturi.task("plain")
class Plain:
    text: str = ""

queue = venturi.Queue(sys.argv[1], dsn=sys.argv[2])

@queue.handler
def plain(task: Plain) -> None:
    pass

queue.work(concurrency=2, poll=60)
"""

    def __init__(self, folder: Path, schema: str, dsn: str) -> None:
        script = folder / "worker.py"
        script.write_text(self.SCRIPT)
        self._command = [sys.executable, str(script), schema, dsn]

    def __enter__(self) -> None:
        path = os.pathsep.join([str(Path(venturi.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(self._command, env={**os.environ, "PYTHONPATH": path})

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        assert self._process.wait(15) == 0
