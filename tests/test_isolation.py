"""Transactions that meet: who waits for whom, and what each sees of the other."""

from __future__ import annotations

import collections.abc as cabc
import typing as t
from concurrent.futures import Future, ThreadPoolExecutor

import psycopg
import pytest
from fixtures.waiting import eventually
from fixtures.work import ended, working
from psycopg import conninfo, sql

import venturi

Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[t.Any]]


@venturi.task("keyed")
class Keyed:
    key: str
    number: int = 0

    def dedup_key(self) -> str:
        return self.key

    def merge(self, existing: venturi.Pending[Keyed]) -> venturi.Merge[Keyed]:
        return venturi.Combine(Keyed(self.key, existing.task.number + self.number))


@pytest.fixture
def schema(emptied: str) -> str:
    """One schema for all tests here, emptied after each."""
    return emptied


@pytest.fixture
def aside() -> cabc.Iterator[ThreadPoolExecutor]:
    """Threads for what has to wait."""
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.mark.conformance(58)
@pytest.mark.parametrize("commits", [True, False])
def test_a_second_producer_of_a_key_waits_for_the_first(
    queue: venturi.Queue, connect: Connect, aside: ThreadPoolExecutor, commits: bool
) -> None:
    """The second waits for the end of the first transaction, and merges into its job if that committed."""
    first_conn = connect()
    first = queue.enqueue(Keyed("a", 1), conn=first_conn)
    waiting = aside.submit(queue.enqueue, Keyed("a", 2))
    blocked(connect, waiting)
    first_conn.commit() if commits else first_conn.rollback()
    second = waiting.result(5)
    assert second.action == ("combined" if commits else "inserted")
    assert [job.id for job in queue.jobs()] == [second.id]
    assert (second.id == first.id) is commits


@pytest.mark.conformance(58)
def test_aliases_of_a_kind_wait_for_each_other(
    queue: venturi.Queue, connect: Connect, aside: ThreadPoolExecutor, dsn: str
) -> None:
    """A producer of the former kind, as in a rolling deploy, and one of the new kind leave one job per key."""

    @venturi.task("keyed.new", aliases=["keyed"])
    class New:
        key: str
        number: int = 0

        def dedup_key(self) -> str:
            return self.key

    newer = venturi.Queue(queue.schema, dsn=dsn)
    older = connect()
    first = queue.enqueue(Keyed("a", 1), conn=older)
    waiting = aside.submit(newer.enqueue, New("a", 2))
    blocked(connect, waiting)
    older.commit()
    assert waiting.result(5) == venturi.Receipt(first.id, "replaced")
    newer.close()


@pytest.mark.conformance(58)
def test_a_transaction_that_holds_a_job_delays_no_other(queue: venturi.Queue, connect: Connect) -> None:
    """While one transaction holds a job and its key, other jobs of its kind are enqueued, claimed and settled."""

    @queue.handler
    def keyed(task: Keyed) -> None:
        pass

    held = queue.enqueue(Keyed("a", 1))
    caller = connect()
    queue.enqueue(Keyed("a", 1), conn=caller)
    queue.enqueue(Keyed("b", 1), conn=caller)
    with working(queue):
        others = queue.enqueue_many([Keyed(str(n)) for n in range(20)])
        for receipt in others:
            ended(queue, receipt.id)
        assert queue.journal(held.id) == []
        caller.commit()
        ended(queue, held.id)
    job = queue.job(held.id)
    assert job is not None
    assert job.payload == {"key": "a", "number": 2}


@pytest.mark.conformance(58)
@pytest.mark.parametrize("commits", [True, False])
def test_a_job_that_goes_while_a_merge_waits_for_it_is_no_candidate(
    queue: venturi.Queue, connect: Connect, aside: ThreadPoolExecutor, commits: bool
) -> None:
    """A merge that waits for a transaction which cancels its candidate inserts, or merges when the cancel is undone."""
    first = queue.enqueue(Keyed("a", 1))
    operator = connect()
    assert queue.cancel(first.id, conn=operator)
    waiting = aside.submit(queue.enqueue, Keyed("a", 2))
    blocked(connect, waiting)
    operator.commit() if commits else operator.rollback()
    assert waiting.result(5).action == ("inserted" if commits else "combined")


@pytest.mark.conformance(58)
def test_a_merge_goes_by_the_row_as_it_is_after_the_wait(
    queue: venturi.Queue, connect: Connect, aside: ThreadPoolExecutor
) -> None:
    """A candidate that changes while the merge waits for its row is merged as it is then, and is rewritten in full."""
    first = queue.enqueue(Keyed("a", 1))
    other = connect()
    change = sql.SQL("UPDATE {} SET failure_count = 3, run_count = 4")
    other.execute(change.format(sql.Identifier(queue.schema, "live")))
    waiting = aside.submit(queue.enqueue, Keyed("a", 2), priority=venturi.Priority.HIGH)
    blocked(connect, waiting)
    other.commit()
    assert waiting.result(5).id == first.id
    job = queue.job(first.id)
    assert job is not None
    assert (job.payload["number"], job.priority, job.failure_count, job.run_count) == (3, 0, 3, 4)
    assert queue.journal(first.id)[0].run_no == 4


@pytest.mark.conformance(59)
def test_a_repeatable_read_caller_gets_the_serialization_failure(queue: venturi.Queue, connect: Connect) -> None:
    """A candidate that changed since the caller's snapshot gives psycopg's error, neither hidden nor retried.

    Case 043.
    """
    queue.enqueue(Keyed("a", 1))
    caller = connect()
    caller.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    caller.execute("SELECT 1")
    queue.enqueue(Keyed("a", 1))
    with pytest.raises(psycopg.errors.SerializationFailure):
        queue.enqueue(Keyed("a", 1), conn=caller)
    caller.rollback()
    assert queue.enqueue(Keyed("a", 1), conn=caller).action == "combined"


@pytest.mark.conformance(59)
def test_a_repeatable_read_caller_leaves_a_sibling_of_what_it_cannot_see(
    queue: venturi.Queue, connect: Connect
) -> None:
    """A job that is younger than the caller's snapshot cannot be merged into: both are pending, nothing is lost."""
    caller = connect()
    caller.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    caller.execute("SELECT 1")
    queue.enqueue(Keyed("a", 1))
    assert queue.enqueue(Keyed("a", 1), conn=caller).action == "inserted"
    caller.commit()
    assert len(queue.jobs(status="pending")) == 2


@pytest.mark.conformance(59)
def test_the_queues_own_connections_read_committed(dsn: str, schema: str, connect: Connect) -> None:
    """Whatever the role or the connection string asks for, the library's own sessions do not fail to serialize.

    Case 043.
    """
    strict = "-c default_transaction_isolation=serializable -c default_transaction_read_only=on"
    queue = venturi.Queue(schema, dsn=conninfo.make_conninfo(dsn, options=strict))

    @queue.handler
    def keyed(task: Keyed) -> None:
        pass

    with ThreadPoolExecutor(8) as pool:
        receipts = list(pool.map(queue.enqueue, [Keyed("a", 1)] * 40))
    assert [receipt.action for receipt in receipts].count("inserted") == 1
    with working(queue):
        assert ended(queue, receipts[0].id).payload["number"] == 40
    queue.close()


def test_a_deadlock_of_two_callers_reaches_one_of_them(
    queue: venturi.Queue, connect: Connect, aside: ThreadPoolExecutor
) -> None:
    """Keys taken one by one in opposite orders: psycopg's error for one, unchanged; the other goes on (case 051)."""
    one, other = connect(), connect()
    queue.enqueue(Keyed("a"), conn=one)
    queue.enqueue(Keyed("b"), conn=other)
    waiting = aside.submit(queue.enqueue, Keyed("b"), conn=one)
    blocked(connect, waiting)
    try:
        queue.enqueue(Keyed("a"), conn=other)
    except psycopg.errors.DeadlockDetected:
        other.rollback()
        waiting.result(5)
        one.commit()
    else:
        with pytest.raises(psycopg.errors.DeadlockDetected):
            waiting.result(5)
        one.rollback()
        other.commit()
    assert sorted(job.dedup_key or "" for job in queue.jobs()) == ["a", "b"]


def blocked(connect: Connect, waiting: Future[t.Any]) -> None:
    """Wait until some session of the database waits for a lock, which is what the future must be doing."""
    observer = connect(autocommit=True)
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"

    def waits() -> bool:
        row = observer.execute(query).fetchone()
        return row is not None and row[0] > 0

    eventually(waits, what="a session waits for a lock")
    assert not waiting.done()
