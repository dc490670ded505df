"""Many tasks in one call: one transaction that leaves what they would leave one by one."""

from __future__ import annotations

import collections.abc as cabc
import datetime as dt
import itertools
import threading
import time
import typing as t
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from fixtures.statements import Bell, traced
from fixtures.work import ended, parked, working
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import sql
from psycopg.pq import TransactionStatus

import venturi
from venturi import Priority
from venturi.store import producing
from venturi.store.connections import run

Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[t.Any]]

HOUR = dt.timedelta(hours=1)


@venturi.task("plain")
class Plain:
    value: t.Any = None


@venturi.task("café")
class Accented:
    text: str = ""


@venturi.task("merging", carry=dict, priority=Priority.LOW)
class Merging:
    """A task whose decision is part of it."""

    key: str
    decision: t.Literal["keep", "replace", "combine", "later", "independent"]
    number: int

    def dedup_key(self) -> str:
        return self.key

    def merge(self, existing: venturi.Pending[Merging, dict[str, int]]) -> venturi.Merge[Merging]:
        total = Merging(self.key, self.decision, self.number + existing.task.number)
        match self.decision:
            case "keep":
                return venturi.Keep()
            case "replace":
                return venturi.Replace()
            case "combine":
                return venturi.Combine(total, carry={"merges": existing.carry.get("merges", 0) + 1})
            case "later":
                return venturi.Combine(total, delay=HOUR, priority=Priority.HIGH)
            case "independent":
                return venturi.Independent()


MANY = st.lists(
    st.builds(
        Merging,
        st.sampled_from("abc"),
        st.sampled_from(["keep", "replace", "combine", "later", "independent"]),
        st.integers(0, 9),
    ),
    max_size=12,
)


def singly(queue: venturi.Queue, caller: psycopg.Connection[t.Any], tasks: list[Merging]) -> list[venturi.Receipt]:
    return [queue.enqueue(task, conn=caller) for task in tasks]


def many(queue: venturi.Queue, caller: psycopg.Connection[t.Any], tasks: list[Merging]) -> list[venturi.Receipt]:
    return queue.enqueue_many(tasks, conn=caller)


@pytest.fixture
def schema(emptied: str) -> str:
    """One schema for all tests here, emptied after each."""
    return emptied


@pytest.mark.conformance(61)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=MANY, tasks=MANY)
def test_a_batch_leaves_what_its_tasks_leave_one_by_one(
    queue: venturi.Queue, connect: Connect, before: list[Merging], tasks: list[Merging]
) -> None:
    """Receipts in order, jobs and entries are the same, whatever merges into whatever."""
    outcomes: list[object] = []
    caller = connect()
    for enqueue in (singly, many):
        for task in before:
            queue.enqueue(task, conn=caller)
        outcomes.append(_left(queue, caller, enqueue(queue, caller, tasks)))
        caller.rollback()
    caller.close()
    assert outcomes[0] == outcomes[1]


@pytest.mark.conformance(61)
def test_nothing_sends_nothing(queue: venturi.Queue, connect: Connect, dsn: str) -> None:
    """An empty sequence has no receipts and needs no server (case 165)."""
    caller = connect()
    with traced(caller) as sent:
        assert queue.enqueue_many([], conn=caller) == []
        assert queue.enqueue_many(iter(()), conn=caller) == []
    assert sent.bytes == 0
    assert venturi.Queue("nowhere", dsn="host=127.0.0.1 port=1").enqueue_many([]) == []


@pytest.mark.conformance(61)
@pytest.mark.parametrize("number", [20, producing.FIRST_ROWS * 3 + 1], ids=["one statement", "three"])
def test_jobs_of_a_batch_are_claimed_in_the_order_given(queue: venturi.Queue, number: int) -> None:
    """One after another, after what was ready before and before what comes later, and all due at once."""
    seen: list[int] = []
    done = threading.Event()

    @queue.handler
    def plain(task: Plain) -> None:
        seen.append(task.value)
        if task.value == number + 1:
            done.set()

    queue.enqueue(Plain(0))
    receipts = queue.enqueue_many(Plain(n) for n in range(1, number + 1))
    queue.enqueue(Plain(number + 1))
    assert queue.stats().kinds["plain"].ready == number + 2
    times = [job.visible_at for job in queue.jobs(limit=1000) if job.visible_at is not None][::-1]
    assert {later - sooner for sooner, later in itertools.pairwise(times[1:-1])} == {dt.timedelta.resolution}
    with working(queue, concurrency=1):
        assert done.wait(10)
    assert seen == list(range(number + 2))
    assert len({receipt.id for receipt in receipts}) == number


@pytest.mark.conformance(62, 44)
@pytest.mark.parametrize("value", ["\0", float("nan"), object()], ids=["NUL", "NaN", "an object"])
def test_one_task_that_cannot_be_stored_refuses_the_batch(
    queue: venturi.Queue, connect: Connect, value: object
) -> None:
    """The error names its position and the path inside it; nothing is sent, and the caller's transaction goes on.

    Cases 001, 003, 165.
    """
    tasks = [Plain(n) for n in range(100)]
    tasks[57] = Plain([value])
    with connect() as caller:
        with traced(caller) as sent, pytest.raises(venturi.PayloadError) as caught:
            queue.enqueue_many(tasks, conn=caller)
        assert sent.bytes == 0
        queue.enqueue(Plain("after"), conn=caller)
    assert (caught.value.index, caught.value.path) == (57, "$.value[0]")
    assert "57" in str(caught.value)
    with pytest.raises(venturi.PayloadError):
        queue.enqueue_many(tasks)
    assert [job.payload for job in queue.jobs()] == [{"value": "after"}]


@pytest.mark.conformance(6, 62)
def test_a_key_that_cannot_be_stored_refuses_the_batch(queue: venturi.Queue) -> None:
    """A key is named by its position as a payload is."""
    with pytest.raises(venturi.PayloadError) as caught:
        queue.enqueue_many([Merging("a", "keep", 1), Merging("x" * 1001, "keep", 1)])
    assert (caught.value.index, caught.value.path) == (1, "dedup_key()")
    assert queue.jobs() == []


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_a_large_batch_has_the_encoding_of_the_callers_session(
    queue: venturi.Queue, connect: Connect, encoding: str
) -> None:
    """The name of a kind and what the tasks hold are stored as they are given (case 088)."""
    caller = connect()
    caller.execute("SELECT set_config('client_encoding', %s, false)", [encoding])
    receipts = queue.enqueue_many([Accented("naïve")] * 1200, conn=caller)
    caller.commit()
    job = queue.job(receipts[0].id)
    assert job is not None
    assert (job.kind, job.payload) == ("café", {"text": "naïve"})
    assert queue.stats().kinds["café"].ready == 1200


def test_a_large_batch_travels_in_parts_of_bounded_size(queue: venturi.Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large the payloads are, no statement and no copy of them in memory grows with the whole batch."""
    monkeypatch.setattr(producing, "PIECE_BYTES", 100_000)
    sizes: list[int] = []

    def measured(connection: t.Any, query: bytes, parameters: tuple[t.Any, ...] = (), **options: t.Any) -> t.Any:
        sizes.append(sum(len(value) for value in parameters if isinstance(value, str)))
        return run(connection, query, parameters, **options)

    monkeypatch.setattr(producing, "run", measured)
    receipts = queue.enqueue_many(Plain("x" * 1000) for _ in range(1000))
    assert len(sizes) > 9
    assert max(sizes) < 120_000
    assert len({receipt.id for receipt in receipts}) == queue.stats().kinds["plain"].ready == 1000


@pytest.mark.conformance(62)
@pytest.mark.parametrize("number", [3, 1500], ids=["one statement", "several"])
def test_a_batch_that_the_server_refuses_writes_nothing(queue: venturi.Queue, connect: Connect, number: int) -> None:
    """It is one transaction: body and live rows of all tasks, or of none (case 165)."""
    live = sql.Identifier(queue.schema, "live")
    operator = connect(autocommit=True)
    operator.execute(sql.SQL("ALTER TABLE {} ADD CONSTRAINT no_merging CHECK (kind <> 'merging')").format(live))
    with pytest.raises(psycopg.errors.CheckViolation):
        queue.enqueue_many([*[Plain(n) for n in range(number)], Merging("a", "keep", 1)])
    operator.execute(sql.SQL("ALTER TABLE {} DROP CONSTRAINT no_merging").format(live))
    assert queue.jobs() == []


@pytest.mark.conformance(62)
@pytest.mark.parametrize("tasks", [[Plain()] * 1200, [Merging(str(n), "keep", n) for n in range(1200)]])
def test_a_large_batch_is_left_to_the_caller_to_commit(
    queue: venturi.Queue, connect: Connect, tasks: list[object]
) -> None:
    """However many statements it takes, a caller that rolls back leaves nothing of it (case 039)."""
    caller = connect()
    assert len(queue.enqueue_many(tasks, conn=caller)) == 1200
    assert caller.info.transaction_status == TransactionStatus.INTRANS
    caller.rollback()
    assert queue.jobs() == []


@pytest.mark.conformance(62)
def test_an_interrupted_batch_leaves_the_callers_transaction_as_it_was(
    queue: venturi.Queue, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that goes on after an interrupt between two statements commits nothing of the batch (case 038)."""
    calls = itertools.count()

    def interrupted(connection: t.Any, *statement: t.Any, **options: t.Any) -> t.Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return run(connection, *statement, **options)

    with connect() as caller:
        queue.enqueue(Plain("before"), conn=caller)
        with monkeypatch.context() as patch:
            patch.setattr(producing, "run", interrupted)
            with pytest.raises(KeyboardInterrupt):
                queue.enqueue_many([Plain(n) for n in range(1200)], conn=caller)
        queue.enqueue(Plain("after"), conn=caller)
    assert [job.payload["value"] for job in queue.jobs()] == ["after", "before"]


@pytest.mark.conformance(63)
def test_kinds_may_be_mixed_and_options_hold_for_all(queue: venturi.Queue) -> None:
    """Delay and priority of the call are every task's; without them each has its own."""
    tasks = [Plain(), Merging("a", "keep", 1), Plain()]
    own = [queue.job(receipt.id) for receipt in queue.enqueue_many(tasks)]
    assert [(job.kind, job.priority) for job in own if job] == [("plain", 1), ("merging", 2), ("plain", 1)]
    queue.cancel(t.cast(venturi.Job, own[1]).id)
    for options in ({"delay": HOUR}, {"at": dt.datetime.now(dt.UTC) + HOUR}):
        receipts = queue.enqueue_many(tasks, priority=Priority.HIGH, **t.cast(t.Any, options))
        for job in [queue.job(receipt.id) for receipt in receipts]:
            assert job is not None
            assert job.priority is Priority.HIGH
            assert job.visible_at is not None
            assert abs(job.visible_at - job.created_at - HOUR) < dt.timedelta(seconds=2)
            queue.cancel(job.id)


@pytest.mark.conformance(63)
@pytest.mark.slow
@pytest.mark.parametrize("autocommit", [True, False])
def test_ten_thousand_plain_tasks_take_few_statements(queue: venturi.Queue, connect: Connect, autocommit: bool) -> None:
    """Fewer than 20, whether the caller has a transaction or not, and each job is there with its own payload.

    Case 165.
    """
    caller = connect(autocommit=autocommit)
    with traced(caller) as sent:
        receipts = queue.enqueue_many((Plain(f"tab\t back\\slash {n}") for n in range(10_000)), conn=caller)
    assert 0 < sent.statements < 20
    caller.commit()
    job = queue.job(receipts[7777].id)
    assert job is not None
    assert job.payload == {"value": "tab\t back\\slash 7777"}
    assert queue.stats().kinds["plain"].ready == 10_000


@pytest.mark.conformance(64)
def test_batches_in_opposite_orders_meet_no_deadlock(queue: venturi.Queue) -> None:
    """Two threads that send the same hundred keys from either end, fifty times, leave one job per key (case 051)."""
    tasks = [Merging(str(n), "combine", 1) for n in range(100)]

    def send(given: list[Merging]) -> None:
        for _ in range(50):
            queue.enqueue_many(given)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(send, order) for order in (tasks, tasks[::-1])]:
            done.result(60)
    jobs = queue.jobs(limit=1000)
    assert len(jobs) == 100
    assert {job.payload["number"] for job in jobs} == {100}


@pytest.mark.conformance(64)
def test_batches_beside_workers_meet_no_deadlock(queue: venturi.Queue) -> None:
    """While workers claim and settle the same keys, no batch fails and no number is lost (case 051)."""
    seen: list[int] = []

    @queue.handler
    def merging(task: Merging) -> None:
        seen.append(task.number)

    tasks = [Merging(chr(97 + n), "combine", 1) for n in range(26)]

    def send(given: list[Merging]) -> list[venturi.Receipt]:
        return [receipt for _ in range(20) for receipt in queue.enqueue_many(given)]

    with working(queue, concurrency=4), ThreadPoolExecutor(2) as pool:
        sent = [pool.submit(send, order) for order in (tasks, tasks[::-1])]
        for id_ in {receipt.id for done in sent for receipt in done.result(60)}:
            ended(queue, id_)
    assert sum(seen) == 2 * 20 * 26


@pytest.mark.conformance(65)
@pytest.mark.parametrize("tasks", [[Plain()] * 100, [Plain()] * 2000, [Merging(str(n), "keep", 1) for n in range(600)]])
def test_one_call_rings_once(queue: venturi.Queue, connect: Connect, tasks: list[object]) -> None:
    """However many tasks there are, a parked worker is notified once (case 111)."""
    bell = Bell(connect(autocommit=True), queue.schema)
    queue.enqueue_many(tasks)
    assert bell.rings() == 1
    queue.enqueue_many(tasks, notify=False)
    assert bell.rings() == 0


@pytest.mark.conformance(65)
def test_a_parked_worker_starts_on_a_batch(queue: venturi.Queue, dsn: str, connect: Connect) -> None:
    """A worker asleep for a minute begins within 250 ms of the call's commit."""

    @queue.handler
    def plain(task: Plain) -> None:
        pass

    producer = venturi.Queue(queue.schema, dsn=dsn)  # knows no worker of this process, like one of another
    with working(queue, poll=60):
        parked(connect(autocommit=True))
        before = time.time()
        first = producer.enqueue_many([Plain()] * 5)[0]
        ended(queue, first.id)
    assert queue.journal(first.id)[-1].recorded_at.timestamp() - before < 0.25
    producer.close()


def _left(queue: venturi.Queue, caller: psycopg.Connection[t.Any], receipts: list[venturi.Receipt]) -> object:
    """What jobs and entries there are, without ids and times."""
    jobs = queue.jobs(conn=caller, limit=1000)[::-1]
    number = {job.id: n for n, job in enumerate(jobs)}
    return (
        [(number[receipt.id], receipt.action) for receipt in receipts],
        [(job.payload, job.carry, job.priority, job.failure_count, _soon(job)) for job in jobs],
        [[(e.outcome, e.note, e.evidence["priority"]) for e in queue.journal(job.id, conn=caller)] for job in jobs],
    )


def _soon(job: venturi.Job) -> bool:
    return job.visible_at is not None and job.visible_at - job.created_at < HOUR / 2
