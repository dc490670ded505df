"""The recipes for merge() that the README shows do what it says, with one caller and with many at once."""

from __future__ import annotations

import collections.abc as cabc
import datetime as dt
import threading
import typing as t
from concurrent.futures import ThreadPoolExecutor

import attrs
import psycopg
import pytest
from psycopg import sql

import venturi
from venturi import Combine, Keep, Merge, Pending, Priority, Replace
from venturi.testing import call, drain, queued

Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[t.Any]]

QUIET = dt.timedelta(minutes=1)
LONGEST = dt.timedelta(minutes=10)
MARGIN = dt.timedelta(seconds=10)
BEGUN = dt.datetime.now(dt.UTC)


@venturi.task("recipe.rebuild")
@attrs.frozen
class Rebuild:
    """Debounce with a bound: a minute after the last enqueue, ten minutes after the first at the latest."""

    index: str

    def dedup_key(self) -> str:
        return self.index

    def merge(self, existing: Pending[Rebuild]) -> Merge[Rebuild]:
        return Replace(delay=min(QUIET, LONGEST - existing.age))


@venturi.task("recipe.store")
class Store:
    """Keep the newest: what arrives late does not undo what is newer."""

    document: int
    version: int

    def dedup_key(self) -> int:
        return self.document

    def merge(self, existing: Pending[Store]) -> Merge[Store]:
        return Replace() if self.version > existing.task.version else Keep()


@venturi.task("recipe.notify")
class Notify:
    """Union: one mail with everything."""

    user: int
    messages: frozenset[str]

    def dedup_key(self) -> int:
        return self.user

    def merge(self, existing: Pending[Notify]) -> Merge[Notify]:
        return Combine(Notify(self.user, existing.task.messages | self.messages))


@venturi.task("recipe.sync", priority=Priority.LOW)
class Sync:
    """Escalate: the most urgent request counts, whatever comes after it."""

    account: int

    def dedup_key(self) -> int:
        return self.account

    def merge(self, existing: Pending[Sync]) -> Merge[Sync]:
        return Combine(self, priority=min(existing.priority, existing.asked_priority))


@attrs.define
class Todo:
    urls: list[str] = attrs.field(factory=list[str])


@venturi.task("recipe.crawl", carry=Todo)
class Crawl:
    """Add to the state of a job that has paused: it goes on with what was left, and with what is new."""

    site: str
    urls: list[str]

    def dedup_key(self) -> str:
        return self.site

    def merge(self, existing: Pending[Crawl, Todo]) -> Merge[Crawl]:
        if existing.run_count == 0:
            return Combine(Crawl(self.site, existing.task.urls + self.urls))
        return Combine(existing.task, carry=Todo(existing.carry.urls + self.urls))


@venturi.Queue("aside").handler
def crawl(task: Crawl, ctx: venturi.Context[Todo]) -> venturi.Outcome:
    """One page a run; the first run moves the payload into the carry."""
    if ctx.run_count == 1:
        ctx.carry.urls = list(task.urls)
    ctx.attach(url=ctx.carry.urls.pop(0))
    return venturi.Pause(QUIET) if ctx.carry.urls else None


# --- One caller


def test_a_debounce_moves_the_run_away_but_not_for_ever(queue: venturi.Queue, connect: Connect) -> None:
    """Due a minute after the last enqueue, and at once when the first is ten minutes old."""
    conn = connect()

    def due() -> dt.timedelta:
        (job,) = queue.jobs(conn=conn)
        assert job.visible_at is not None
        return job.visible_at - dt.datetime.now(dt.UTC)

    aged = sql.SQL("UPDATE {} SET created_at = created_at - %s").format(sql.Identifier(queue.schema, "jobs"))
    for age, expected in zip(
        (0 * QUIET, LONGEST - QUIET / 2, LONGEST + QUIET), (QUIET, QUIET / 2, 0 * QUIET), strict=True
    ):
        queue.enqueue(Rebuild("books"), conn=conn, delay=QUIET)
        conn.execute(aged, (age,))
        assert queue.enqueue(Rebuild("books"), conn=conn, delay=QUIET).action == "replaced"
        assert abs(due() - expected) < MARGIN
        conn.rollback()


def test_the_newest_version_stays_whatever_comes_in_what_order(queue: venturi.Queue, connect: Connect) -> None:
    """A late older version is dropped, a newer one replaces; also within one batch."""
    conn = connect()
    tasks = [Store(7, version) for version in (2, 1, 3, 3, 2)]
    receipts = [queue.enqueue(task, conn=conn) for task in tasks]
    assert [receipt.action for receipt in receipts] == ["inserted", "kept", "replaced", "kept", "kept"]
    assert queued(conn, queue=queue) == [Store(7, 3)]
    conn.rollback()
    batch = queue.enqueue_many(tasks, conn=conn)
    assert [receipt.action for receipt in batch] == [receipt.action for receipt in receipts]
    assert queued(conn, queue=queue) == [Store(7, 3)]


def test_a_union_holds_all_messages_and_goes_out_when_the_first_was_due(queue: venturi.Queue, connect: Connect) -> None:
    """A steady stream cannot put it off."""
    conn = connect()
    first = queue.enqueue(Notify(1, frozenset({"hello"})), conn=conn, delay=QUIET)
    due = queue.job(first.id, conn=conn)
    queue.enqueue(Notify(1, frozenset({"news"})), conn=conn, delay=LONGEST)
    assert queued(conn, queue=queue) == [Notify(1, frozenset({"hello", "news"}))]
    after = queue.job(first.id, conn=conn)
    assert due is not None
    assert after is not None
    assert after.visible_at == due.visible_at


def test_the_most_urgent_request_counts(queue: venturi.Queue, connect: Connect) -> None:
    """A later one of lower priority does not take it back."""
    conn = connect()
    seen: list[Priority] = []
    for urgency in (Priority.LOW, Priority.NORMAL, Priority.HIGH, Priority.NORMAL, Priority.LOW):
        queue.enqueue(Sync(1), conn=conn, priority=urgency)
        (job,) = queue.jobs(conn=conn)
        seen.append(job.priority)
    assert seen == [2, 1, 0, 0, 0]


def test_a_paused_job_is_given_more_to_do(queue: venturi.Queue, connect: Connect) -> None:
    """Before its first run the payload grows, afterwards the carry; every page is read once, in order."""
    conn = connect()
    queue.handler(crawl)
    receipt = queue.enqueue(Crawl("x", ["1", "2"]), conn=conn)
    queue.enqueue(Crawl("x", ["3"]), conn=conn)
    for minutes in (0, 2):
        drain(conn, queue=queue, now=minutes * QUIET)
    queue.enqueue(Crawl("x", ["4"]), conn=conn)
    assert queued(conn, queue=queue) == [Crawl("x", ["1", "2", "3"])]
    for minutes in (4, 6, 8):
        drain(conn, queue=queue, now=minutes * QUIET)
    entries = [entry for entry in queue.journal(receipt.id, conn=conn) if entry.outcome != "merged"]
    assert [entry.evidence["url"] for entry in entries] == ["1", "2", "3", "4"]
    assert entries[-1].outcome == "completed"
    assert call(crawl, Crawl("x", ["1"])).outcome is None


# --- Many callers

Check: t.TypeAlias = cabc.Callable[[t.Any, venturi.Job], bool]

STORMS: dict[str, tuple[cabc.Callable[[int], object], Check]] = {
    "debounce": (lambda n: Rebuild("a"), lambda task, job: (job.visible_at or BEGUN) > BEGUN + QUIET / 2),
    "newest": (lambda n: Store(1, n * 7 % 32), lambda task, job: task.version == 31),
    "union": (lambda n: Notify(1, frozenset({str(n)})), lambda task, job: len(task.messages) == 32),
    "escalate": (lambda n: Sync(1), lambda task, job: job.priority == 0),
    "paused": (lambda n: Crawl("a", [str(n)]), lambda task, job: len(task.urls) == 32),
}


@pytest.mark.conformance(83)
@pytest.mark.parametrize(("make", "holds"), STORMS.values(), ids=STORMS)
def test_a_recipe_loses_nothing_in_a_storm(
    queue: venturi.Queue, connect: Connect, make: cabc.Callable[[int], t.Any], holds: Check
) -> None:
    """32 threads that enqueue one key at once leave one pending job that holds what all of them asked for."""

    def produce(number: int) -> venturi.Receipt:
        task = make(number)
        return queue.enqueue(task, priority=Priority.HIGH if number == 9 else None, delay=QUIET)

    receipts = at_once(32, produce)
    (job,) = queue.jobs()
    assert {receipt.id for receipt in receipts} == {job.id}
    assert job.status == "pending"
    assert sorted(receipt.action for receipt in receipts).count("inserted") == 1
    (task,) = queued(connect(), queue=queue)
    assert holds(task, job)


@pytest.mark.conformance(83)
def test_a_paused_job_loses_nothing_in_a_storm(queue: venturi.Queue, connect: Connect) -> None:
    """Its carry has what was left, and what 32 threads add at once."""
    queue.handler(crawl)
    receipt = queue.enqueue(Crawl("a", ["first", "left"]))
    with connect() as conn:
        drain(conn, queue=queue)
    at_once(32, lambda number: queue.enqueue(Crawl("a", [str(number)])))
    job = queue.job(receipt.id)
    assert job is not None
    assert sorted(job.carry["urls"]) == sorted(["left", *map(str, range(32))])
    assert len(queue.jobs()) == 1


@pytest.mark.parametrize("own", [True, False], ids=["transactions of its own", "transactions of the callers"])
def test_batches_with_their_keys_in_any_order_do_not_deadlock(
    queue: venturi.Queue, connect: Connect, own: bool
) -> None:
    """Half of the threads name the keys backwards: each batch locks in one order, and all of them are merged."""
    users = range(40)

    def produce(number: int) -> None:
        order = list(users) if number % 2 else list(reversed(users))
        tasks = [Notify(user, frozenset({f"{number} {turn}"})) for turn in range(2) for user in order]
        if own:
            queue.enqueue_many(tasks)
            return
        with connect() as conn:
            queue.enqueue_many(tasks, conn=conn)

    at_once(8, produce)
    stored = {job.payload["user"]: len(job.payload["messages"]) for job in queue.jobs()}
    assert stored == dict.fromkeys(users, 16)


def at_once(threads: int, produce: cabc.Callable[[int], t.Any]) -> list[t.Any]:
    """Call it from many threads at once."""
    ready = threading.Barrier(threads)

    def ready_and_go(number: int) -> t.Any:
        ready.wait(10)
        return produce(number)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(ready_and_go, range(threads)))
