"""Commits whose answer never comes: the database has done it, and whoever asked cannot know."""

from __future__ import annotations

import collections.abc as cabc
import datetime as dt
import pathlib
import threading
import time
import typing as t

import psycopg
import pytest
from faults.accounting import accounted
from faults.crew import done, query
from faults.deeds import Deed, effects, register
from faults.wire import Wire
from fixtures.waiting import eventually
from fixtures.work import parked, until, working
from psycopg import conninfo

import venturi
from venturi.store import migrate

pytestmark = pytest.mark.faults

RESTING = """
    SELECT pid FROM pg_stat_activity
     WHERE application_name = 'venturi coordinator' AND state = 'idle'
       AND state_change < clock_timestamp() - interval '300 ms'"""

Queue: t.TypeAlias = venturi.Queue[t.Any]
Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[t.Any]]


@pytest.fixture
def behind(wire: Wire, schema: str, log: pathlib.Path) -> cabc.Iterator[Queue]:
    """The same queue at the other end of the wire, with the handlers of deeds."""
    queue: Queue = venturi.Queue(schema, dsn=wire.dsn)
    register(queue, log)
    yield queue
    queue.close()


def test_a_claim_whose_answer_is_lost_is_given_back(
    queue: Queue, behind: Queue, wire: Wire, connect: Connect, dsn: str, schema: str, log: pathlib.Path
) -> None:
    """The worker that claimed it gives it back as soon as it can, without a failure, and it runs once."""
    claims = "SELECT owner FROM {q}.live WHERE owner IS NOT NULL"
    with working(behind, lease=60, poll=60):
        parked(connect(autocommit=True))
        eventually(lambda: query(dsn, schema, RESTING), what="it sleeps")
        wire.mute("venturi coordinator")
        job = queue.enqueue(Deed()).id
        eventually(lambda: query(dsn, schema, claims), what="it is claimed")
        wire.snip()
        done(dsn, schema)
        entries = until(queue, job, "released", "completed")
    assert (entries[1].run_no, entries[1].failure_count) == (2, 0)
    accounted(dsn, schema, [job], effects=effects(log))


@pytest.mark.conformance(123)
@pytest.mark.parametrize("act", ["wait", "pause", "fail", "permanent"])
def test_a_settle_whose_answer_is_lost_is_done_once(
    act: str, queue: Queue, behind: Queue, wire: Wire, dsn: str, schema: str, log: pathlib.Path
) -> None:
    """The worker asks again, and leaves one entry for one run, whatever its outcome is."""
    began, muted = threading.Event(), threading.Event()

    @behind.handler
    def later(task: Later) -> venturi.Outcome:
        began.set()
        assert muted.wait(10)
        match task.act:
            case "pause":
                return venturi.Pause(dt.timedelta(seconds=0.5)) if len(queue.journal(job)) == 0 else None
            case "fail" if len(queue.journal(job)) == 0:
                raise RuntimeError("as told")
            case "permanent":
                raise venturi.PermanentError("as told")
            case _:
                return None

    first = {"wait": "completed", "pause": "paused", "fail": "retried", "permanent": "dead"}[act]
    with working(behind, concurrency=1):
        job = queue.enqueue(Later(act)).id
        assert began.wait(5)
        wire.mute("venturi coordinator")
        muted.set()
        eventually(lambda: len(queue.journal(job)) == 1, what="its end is committed")
        wire.snip()
        until(queue, job, *([first] if first in ("completed", "dead") else [first, "completed"]), timeout=10)
    accounted(dsn, schema, [job], statuses=("completed", "dead"))


@venturi.task("later", backoff=venturi.Backoff(0.05, 0.2))
class Later:
    act: str


def test_a_renewal_whose_answer_is_lost_costs_nothing(
    queue: Queue, behind: Queue, wire: Wire, dsn: str, schema: str, log: pathlib.Path
) -> None:
    """The run goes on, and is completed as the only one."""
    with working(behind, lease=3):
        job = queue.enqueue(Deed("sleep", 4.0)).id
        lease = "SELECT lease_until FROM {q}.live WHERE owner IS NOT NULL"
        before = eventually(lambda: query(dsn, schema, lease), what="it is claimed")
        wire.mute("venturi maintainer", since=b"SET lease_until")
        eventually(lambda: query(dsn, schema, lease) != before, what="it is renewed")
        wire.snip()
        until(queue, job, "completed", timeout=10)
    assert accounted(dsn, schema, [job], effects=effects(log)) == {"completed": 1}


def test_a_recovery_whose_answer_is_lost_is_done_once(
    queue: Queue, behind: Queue, wire: Wire, dsn: str, schema: str
) -> None:
    """The journal has one entry of it, and the failure is counted once."""
    job = queue.enqueue(Deed()).id
    with working(behind, lease=3):
        until(queue, job, "completed")
        wire.mute("venturi maintainer", since=b"jsonb_to_recordset")
        stranded = queue.enqueue(Deed(), delay=dt.timedelta(hours=1)).id
        query(
            dsn, schema,
            """UPDATE {q}.live SET owner = gen_random_uuid(), lease_until = now() - interval '1 s', run_count = 1,
                      visible_at = now() WHERE id = %s""",
            stranded,
        )  # fmt: skip
        eventually(lambda: [e.outcome for e in queue.journal(stranded)] == ["recovered"], 10, what="it is recovered")
        wire.snip()
        until(queue, stranded, "recovered", "completed", timeout=15)
    accounted(dsn, schema, [job, stranded])


@pytest.mark.parametrize("key", [None, "key"])
def test_an_enqueue_whose_answer_is_lost_raises_and_is_all_or_nothing(
    key: str | None, queue: Queue, behind: Queue, wire: Wire, dsn: str, schema: str, log: pathlib.Path
) -> None:
    """The caller is told by an error; the job is there and runs once. With a key the next try merges into it."""
    task = Deed() if key is None else Keyed(key)
    raised: list[BaseException] = []

    def enqueue() -> None:
        try:
            behind.enqueue(task)
        except psycopg.OperationalError as error:
            raised.append(error)

    behind.stats()  # opens the session
    wire.mute("venturi producer", since=b"" if key is None else b"COMMIT\0")
    thread = threading.Thread(target=enqueue)
    thread.start()
    eventually(lambda: query(dsn, schema, "SELECT id FROM {q}.live"), what="it is committed")
    wire.snip()
    thread.join(10)
    assert raised
    again = behind.enqueue(task)
    assert again.action == ("inserted" if key is None else "replaced")

    @behind.handler
    def keyed(task: Keyed) -> None:
        pass

    with working(behind):
        done(dsn, schema)
    outcomes = accounted(dsn, schema, [again.id])
    assert outcomes == ({"completed": 2} if key is None else {"completed": 1, "merged": 1})


@venturi.task("keyed")
class Keyed:
    key: str

    def dedup_key(self) -> str:
        return self.key


def test_a_migration_whose_answer_is_lost_is_done_and_not_done_again(wire: Wire, dsn: str, schema: str) -> None:
    """It raises; what was committed is whole, the lock is gone, and migrating again does the rest only (case 143)."""
    query(dsn, schema, "DROP SCHEMA {q} CASCADE")
    raised: list[BaseException] = []

    def apply() -> None:
        try:
            migrate.migrate(conninfo.make_conninfo(wire.dsn, application_name="migrating"), schema)
        except psycopg.OperationalError as error:
            raised.append(error)

    wire.mute("migrating", since=b"COMMIT\0")
    thread = threading.Thread(target=apply)
    thread.start()
    eventually(lambda: migrate.status(dsn, schema).version == 1, what="the first file is committed")
    wire.snip()
    thread.join(10)
    assert raised
    rest = migrate.status(dsn, schema).pending
    assert migrate.migrate(dsn, schema) == [*rest]
    assert migrate.status(dsn, schema).version == 1 + len(rest) == migrate.VERSION
    accounted(dsn, schema)


@pytest.mark.parametrize("session", ["coordinator", "maintainer", "listener"])
def test_a_backend_that_is_terminated_while_it_works_is_replaced(
    session: str, queue: Queue, behind: Queue, dsn: str, schema: str, log: pathlib.Path
) -> None:
    """Ended again and again, in the middle of slow statements: nothing is lost, and nothing runs twice."""
    slow = """
        CREATE FUNCTION {q}.slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(0.05); RETURN NULL; END';
        CREATE TRIGGER slow AFTER INSERT ON {q}.journal FOR EACH STATEMENT EXECUTE FUNCTION {q}.slow();
        CREATE TRIGGER slow AFTER UPDATE ON {q}.live FOR EACH STATEMENT EXECUTE FUNCTION {q}.slow()"""
    query(dsn, schema, slow)
    jobs = [receipt.id for receipt in queue.enqueue_many(Deed("sleep", 0.3) for _ in range(60))]
    end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s"
    ended = 0
    with working(behind, concurrency=8, lease=1.5):
        deadline = time.monotonic() + 4
        while time.monotonic() < deadline:
            time.sleep(0.23)
            ended += len(query(dsn, schema, end, f"venturi {session}"))
        done(dsn, schema, 30)
    assert ended > 2
    outcomes = accounted(dsn, schema, jobs, effects=effects(log))
    assert outcomes["completed"] == 60
    assert sorted(each.job for each in effects(log) if each.what == "start") == sorted(jobs)
    if session != "coordinator":
        assert outcomes == {"completed": 60}
