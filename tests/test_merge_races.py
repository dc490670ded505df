"""Merges beside other producers, workers, odd rows and errors."""

from __future__ import annotations

import collections.abc as cabc
import datetime as dt
import logging
import threading
import time
import typing as t
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from fixtures.work import ended, until, working
from psycopg import sql

import venturi

Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[t.Any]]

HOUR = dt.timedelta(hours=1)


@venturi.task("counter", carry=dict)
class Counter:
    """Counts what was merged into it."""

    key: str
    number: int = 1
    decision: str = "combine"

    def dedup_key(self) -> str:
        return self.key

    def merge(self, existing: venturi.Pending[Counter, dict[str, int]]) -> venturi.Merge[Counter]:
        total = Counter(self.key, existing.task.number + self.number)
        if self.decision == "raise":
            raise LookupError("no decision")
        return t.cast("venturi.Merge[Counter]", DECISIONS[self.decision](total))


DEEP = f'{{"key": "a", "number": {"[" * 5000 + "]" * 5000}}}'

DECISIONS: dict[str, cabc.Callable[[Counter], t.Any]] = {
    "combine": lambda total: venturi.Combine(total),
    "text": lambda total: "replace",
    "class": lambda total: venturi.Replace,
    "nothing": lambda total: None,
    "a bad delay": lambda total: venturi.Replace(delay=t.cast(dt.timedelta, 5)),
    "a bad priority": lambda total: venturi.Combine(total, priority=t.cast(venturi.Priority, 9)),
    "another task": lambda total: venturi.Combine(Replaced("a", 1)),
    "a bad task": lambda total: venturi.Combine(Counter("a", t.cast(int, "ten"))),
    "NUL": lambda total: venturi.Combine(Counter("\0")),
    "a bad carry": lambda total: venturi.Combine(total, carry={"a": float("nan")}),
}


@venturi.task("replaced")
class Replaced:
    key: str
    number: int

    def dedup_key(self) -> str:
        return self.key


@pytest.fixture
def schema(emptied: str) -> str:
    """One schema for all tests here, emptied after each."""
    return emptied


@pytest.mark.conformance(83)
@pytest.mark.parametrize("first", [True, False], ids=["new key", "pending key"])
def test_a_storm_of_producers_leaves_one_job(queue: venturi.Queue, first: bool) -> None:
    """32 threads that enqueue one key at once leave one pending job, and an entry for every merge (case 053)."""
    if not first:
        queue.enqueue(Replaced("a", 99))
    receipts = _storm(lambda n: queue.enqueue(Replaced("a", n)))
    assert len({receipt.id for receipt in receipts}) == 1
    assert sorted(r.action for r in receipts) == ["inserted"] * first + ["replaced"] * (32 - first)
    assert len(queue.jobs()) == 1
    assert len(queue.journal(receipts[0].id)) == 32 - first


@pytest.mark.conformance(83)
def test_a_storm_of_increments_loses_none(queue: venturi.Queue) -> None:
    """Combine of a counter plus one adds up to the number of producers, singly and in batches."""
    receipts = _storm(lambda n: queue.enqueue(Counter("a")) if n % 2 else queue.enqueue_many([Counter("a")] * 3)[2])
    job = queue.job(receipts[0].id)
    assert job is not None
    assert job.payload["number"] == 16 * 1 + 16 * 3


@pytest.mark.conformance(83)
def test_a_storm_of_callers_leaves_one_job(queue: venturi.Queue, connect: Connect) -> None:
    """The same holds in transactions of the callers' own, with many keys each, in a common order."""

    def produce(number: int) -> list[venturi.Receipt]:
        with connect() as caller:
            return [queue.enqueue(Counter(key), conn=caller) for key in "abcde"]

    _storm(produce)
    assert [job.payload["number"] for job in queue.jobs()] == [32] * 5


@pytest.mark.conformance(84)
def test_a_claim_passes_over_a_job_that_is_being_merged(queue: venturi.Queue, dsn: str, connect: Connect) -> None:
    """While merge() decides, the job is not claimed; it runs with the merged payload right after the commit."""
    seen: list[int] = []

    @queue.handler
    def counter(task: Counter) -> None:
        seen.append(task.number)

    producer = venturi.Queue(queue.schema, dsn=dsn)  # knows no worker of this process, like one of another
    first = producer.enqueue(Counter("a", 10))
    with connect() as caller:
        producer.enqueue(Counter("a", 5), conn=caller)
        with working(queue, poll=60):
            other = producer.enqueue(Counter("b"))
            ended(queue, other.id)
            time.sleep(0.2)  # the worker has looked again and again meanwhile
            assert seen == [1]
            caller.commit()
            committed = time.time()
            ended(queue, first.id)
    assert seen == [1, 15]
    assert queue.journal(first.id)[-1].recorded_at.timestamp() - committed < 0.25
    producer.close()


@pytest.mark.conformance(84)
def test_merges_and_claims_at_once_lose_no_increment(queue: venturi.Queue) -> None:
    """Every increment is in some run's payload, however claims and merges meet."""
    seen: list[int] = []

    @queue.handler
    def counter(task: Counter) -> None:
        seen.append(task.number)

    with working(queue, concurrency=4):
        receipts = _storm(lambda n: [queue.enqueue(Counter("a")) for _ in range(10)])
        for id_ in {receipt.id for row in receipts for receipt in row}:
            ended(queue, id_)
    assert sum(seen) == 320


@pytest.mark.conformance(82)
@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(("payload", value) for value in ('"text"', "[]", "null", "{}", '{"key": "a", "number": "ten"}', "17", DEEP)),
        *(("carry", value) for value in ('"text"', "[]", "17", "true")),
    ],
    ids=lambda text: text[:20],
)
def test_a_candidate_that_cannot_be_decoded_is_passed_over(
    queue: venturi.Queue, connect: Connect, caplog: pytest.LogCaptureFixture, column: str, value: str
) -> None:
    """The next oldest is tried, with none left the task is inserted, and the log names the one passed over.

    Cases 004, 055, 157.
    """
    broken = queue.enqueue(Counter("a"))
    _set(connect, queue, "jobs" if column == "payload" else "live", column, value)
    with caplog.at_level(logging.WARNING, "venturi"):
        second = queue.enqueue(Counter("a"))
    assert second.action == "inserted"
    assert str(broken.id) in caplog.text
    assert queue.enqueue(Counter("a")) == venturi.Receipt(second.id, "combined")
    assert queue.enqueue_many([Counter("a"), Counter("b")])[0].id == second.id
    assert len(queue.jobs()) == 3
    assert queue.journal(broken.id) == []


WRONG: dict[str, type[Exception]] = {
    "raise": LookupError,
    "text": TypeError,
    "class": TypeError,
    "nothing": TypeError,
    "a bad delay": TypeError,
    "a bad priority": venturi.ConfigError,
    "another task": TypeError,
    "a bad task": venturi.PayloadError,
    "NUL": venturi.PayloadError,
    "a bad carry": venturi.PayloadError,
}


@pytest.mark.conformance(85, 52)
@pytest.mark.parametrize(("decision", "error"), WRONG.items(), ids=WRONG)
def test_a_merge_that_goes_wrong_writes_nothing(
    queue: venturi.Queue, connect: Connect, decision: str, error: type[Exception]
) -> None:
    """Its exception reaches the caller; neither job nor journal changes, and the caller's transaction goes on."""
    first = queue.enqueue(Counter("a"))
    before = queue.job(first.id)
    with pytest.raises(error):
        queue.enqueue(Counter("a", 5, decision))
    with pytest.raises(error):
        queue.enqueue_many([Counter("new"), Counter("a", 5, decision)])
    with connect() as caller:
        with pytest.raises(error):
            queue.enqueue(Counter("a", 5, decision), conn=caller)
        queue.enqueue(Counter("b"), conn=caller)
    assert queue.job(first.id) == before
    assert queue.journal(first.id) == []
    assert len(queue.jobs()) == 2


@pytest.mark.conformance(62, 85)
@pytest.mark.parametrize("decision", ["a bad task", "NUL", "a bad carry"])
def test_what_a_merge_of_a_batch_makes_unstorable_is_named_by_position(queue: venturi.Queue, decision: str) -> None:
    """A combined task or carry that cannot be stored is told with the position of the task that asked for it."""
    tasks = [Counter("a"), Counter("b"), Counter("b", 1, decision)]
    with pytest.raises(venturi.PayloadError) as caught:
        queue.enqueue_many(tasks)
    assert caught.value.index == 2
    queue.enqueue(Counter("a"))
    with pytest.raises(venturi.PayloadError) as caught:
        queue.enqueue(Counter("a", 1, decision))
    assert caught.value.index is None


@pytest.mark.conformance(86)
def test_a_job_that_returns_to_pending_stays_beside_a_newer_one(queue: venturi.Queue) -> None:
    """Its key was taken meanwhile: both are pending, and the next enqueue merges into the older of the two."""
    running, go_on = threading.Event(), threading.Event()

    @queue.handler
    def counter(task: Counter) -> venturi.Outcome:
        running.set()
        go_on.wait(5)
        return venturi.Pause(HOUR)

    older = queue.enqueue(Counter("a"))
    with working(queue, concurrency=1):
        assert running.wait(5)
        newer = queue.enqueue(Counter("a"), delay=HOUR)
        assert newer.action == "inserted"
        go_on.set()
        until(queue, older.id, "paused")
    assert {job.id for job in queue.jobs(status="pending")} == {older.id, newer.id}
    assert queue.enqueue(Counter("a")).id == older.id


@pytest.mark.conformance(87)
def test_other_keys_and_no_keys_never_wait(queue: venturi.Queue, connect: Connect) -> None:
    """A transaction that holds keys keeps nobody waiting who uses others, or none."""

    @venturi.task("plain")
    class Plain:
        pass

    @venturi.task("other")
    class Other:
        def dedup_key(self) -> str:
            return "a"

    holder, caller = connect(), connect()
    queue.enqueue_many([Counter(f"held {n}") for n in range(500)], conn=holder)
    queue.enqueue_many([Replaced(f"held {n}", n) for n in range(501)], conn=holder)
    caller.execute("SET lock_timeout = '1s'")
    queue.enqueue(Counter("free"), conn=caller)
    queue.enqueue_many([Counter("free"), Counter("also free")], conn=caller)
    queue.enqueue_many([Plain(), Other()], conn=caller)
    queue.enqueue(Plain(), conn=caller)
    with pytest.raises(psycopg.errors.LockNotAvailable):
        queue.enqueue(Replaced("free", 1), conn=caller)  # of a kind that a batch of over 500 keys holds
    caller.rollback()
    holder.commit()


@pytest.mark.conformance(87)
@pytest.mark.slow
@pytest.mark.parametrize("size", [20_000, 500])
def test_twenty_thousand_keys_in_one_transaction_succeed(queue: venturi.Queue, connect: Connect, size: int) -> None:
    """In one batch or in many, and twice over: the server's lock table, which all share, is not exhausted.

    Case 165.
    """
    tasks = [Replaced(str(n), n) for n in range(20_000)]
    with connect() as caller:
        for action in ("inserted", "replaced"):
            for start in range(0, len(tasks), size):
                receipts = queue.enqueue_many(tasks[start : start + size], conn=caller)
                assert {receipt.action for receipt in receipts} == {action}
        locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
        held = caller.execute(locks).fetchone()
    assert held is not None
    assert held[0] < 5000
    assert queue.stats().kinds["replaced"].ready == 20_000


ALIASES = ("keyed.old", "keyed.older")


@pytest.mark.conformance(9, 79)
def test_an_alias_is_the_same_kind(queue: venturi.Queue, dsn: str) -> None:
    """Jobs stored under former kinds are found by key, the oldest first, and keep the kind they are stored under."""

    @venturi.task("keyed.old")
    class Old:
        key: str
        number: int

        def dedup_key(self) -> str:
            return self.key

    @venturi.task("keyed", aliases=ALIASES)
    class New:
        key: str
        number: int

        def dedup_key(self) -> str:
            return self.key

    former = venturi.Queue(queue.schema, dsn=dsn)
    old = former.enqueue(Old("a", 1))
    assert queue.enqueue(New("a", 2)) == venturi.Receipt(old.id, "replaced")
    fresh = queue.enqueue_many([New("a", 3), New("b", 3)])
    assert fresh[0].id == old.id
    jobs = {job.id: job for job in queue.jobs(kind="keyed")}
    assert [(jobs[r.id].kind, jobs[r.id].payload["number"]) for r in fresh] == [("keyed.old", 3), ("keyed", 3)]
    assert former.enqueue(Old("b", 4)).action == "inserted"  # a producer from before the renaming cannot know
    assert queue.enqueue(New("b", 5)).id == fresh[1].id
    former.close()


def _storm(produce: cabc.Callable[[int], t.Any], threads: int = 32) -> list[t.Any]:
    """Call it from many threads at once."""
    ready = threading.Barrier(threads)

    def at_once(number: int) -> t.Any:
        ready.wait(10)
        return produce(number)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(at_once, range(threads)))


def _set(connect: Connect, queue: venturi.Queue, table: str, column: str, value: str) -> None:
    """Change a column of all rows by hand."""
    change = sql.SQL("UPDATE {} SET {} = %s").format(sql.Identifier(queue.schema, table), sql.Identifier(column))
    connect(autocommit=True).execute(change, (value,))
