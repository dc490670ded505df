"""Which pending job a second enqueue of a dedup key meets, and what merge() is told of it."""

from __future__ import annotations

import collections.abc as cabc
import contextlib
import datetime as dt
import threading
import time
import typing as t

import psycopg
import pytest
from fixtures.deciding import Counter, Seen, decides, given, replaces
from fixtures.statements import traced
from fixtures.waiting import eventually
from fixtures.work import ended, parked, until, working
from psycopg import sql

import venturi
from venturi import Independent, Keep, Pause, Pending, Priority, Replace

Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[t.Any]]

pytestmark = pytest.mark.usefixtures("undecided")

HOUR = dt.timedelta(hours=1)


@pytest.fixture
def schema(emptied: str) -> str:
    """One schema for all tests here, emptied after each."""
    return emptied


@pytest.mark.conformance(78)
@pytest.mark.parametrize("backing_off", [False, True])
def test_a_merge_that_makes_a_job_due_starts_it_on_a_parked_worker(
    queue: venturi.Queue, dsn: str, connect: Connect, backing_off: bool
) -> None:
    """A job due in an hour, or after a failure, runs within 250 ms of the merge, though the worker sleeps a minute."""

    @queue.handler
    def counter(task: Counter) -> None:
        if task.number == 0:
            raise ValueError("not yet")

    producer = venturi.Queue(queue.schema, dsn=dsn)  # knows no worker of this process, like one of another
    with working(queue, poll=60, backoff=venturi.Backoff(3600, 3600)):
        first = producer.enqueue(Counter("a"), delay=dt.timedelta(0) if backing_off else HOUR)
        if backing_off:
            until(queue, first.id, "retried")
        parked(connect(autocommit=True))
        before = time.time()
        assert producer.enqueue(Counter("a", 1)).id == first.id
        ended(queue, first.id)
    assert queue.journal(first.id)[-1].recorded_at.timestamp() - before < 0.25
    producer.close()


@pytest.mark.conformance(84)
def test_many_jobs_that_cannot_be_decoded_cost_an_enqueue_of_their_key_little(
    queue: venturi.Queue, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """The oldest that can be decoded is met after few statements; the oldest that cannot is named, once (case 053)."""
    decides(lambda task, existing: Independent())
    ids = [receipt.id for receipt in queue.enqueue_many([Counter("a", number) for number in range(1500)])]
    caller = connect()
    caller.execute(
        sql.SQL("UPDATE {} SET payload = '{{}}' WHERE id = ANY (%s)").format(sql.Identifier(queue.schema, "jobs")),
        [ids[:-1]],
    )
    decides(replaces)
    with traced(caller) as sent:
        assert queue.enqueue(Counter("a", 7), conn=caller).id == ids[-1]
    assert sent.statements <= 10
    assert [record.getMessage().split()[1] for record in caplog.records if "merged" in record.msg] == [str(ids[0])]


@pytest.mark.conformance(84)
def test_a_merge_into_a_job_of_a_former_kind_is_recorded_under_that_kind(queue: venturi.Queue, dsn: str) -> None:
    """The kind of every entry is the job's."""

    @venturi.task("former")
    class Former:
        def dedup_key(self) -> str:
            return "a"

    @venturi.task("present", aliases=["former"])
    class Present:
        def dedup_key(self) -> str:
            return "a"

    first = queue.enqueue(Former())
    deployed = venturi.Queue(queue.schema, dsn=dsn)
    assert deployed.enqueue(Present()) == venturi.Receipt(first.id, "replaced")
    assert [(entry.kind, entry.outcome) for entry in queue.journal(first.id)] == [("former", "merged")]
    deployed.close()


@pytest.mark.parametrize("others", [0, 300], ids=["alone", "in a large batch"])
@pytest.mark.parametrize("nested", ["cancel", "enqueue", "copy"])
def test_a_merge_may_use_the_callers_connection_but_not_for_the_job_it_was_asked_about(
    queue: venturi.Queue, connect: Connect, nested: str, others: int
) -> None:
    """Nothing keeps it from that; that its task is lost must not pass unsaid. Anything else works (case 041)."""
    caller = connect()

    def meddles(task: Counter, existing: Pending[Counter, Seen]) -> Replace:
        decides(replaces)
        if nested == "cancel":
            queue.cancel(existing.id, conn=caller)
        elif nested == "enqueue":
            queue.enqueue(Counter("a", 3), conn=caller)
        else:
            with caller.cursor().copy("COPY (SELECT 1) TO STDOUT") as copied:
                assert list(copied.rows()) == [("1",)]
        return Replace()

    queue.enqueue(Counter("a", 1))
    decides(meddles)
    tasks = [Counter("a", 2), *(Counter(f"b{n}") for n in range(others))]
    with pytest.raises(RuntimeError, match="itself changed") if nested != "copy" else contextlib.nullcontext():
        assert queue.enqueue_many(tasks, conn=caller)[0].action == "replaced"


def test_the_oldest_job_is_met_behind_one_that_cannot_be_decoded_among_aliases(
    queue: venturi.Queue, dsn: str, connect: Connect
) -> None:
    """Whichever of the kinds it has: a younger job of the other one is not taken for it."""

    def named(kind: str, *aliases: str) -> t.Any:
        @venturi.task(kind, aliases=aliases)
        class Named:
            number: int

            def dedup_key(self) -> str:
                return "a"

            def merge(self, existing: t.Any) -> t.Any:
                return decision

        return Named

    decision: object = Independent()
    former, present = named("former"), named("present", "former")
    deployed = venturi.Queue(queue.schema, dsn=dsn)
    broken, oldest = queue.enqueue(former(1)), queue.enqueue(former(2))
    deployed.enqueue(present(3))
    spoil = sql.SQL("UPDATE {} SET payload = '{{}}' WHERE id = %s").format(sql.Identifier(queue.schema, "jobs"))
    connect(autocommit=True).execute(spoil, [broken.id])
    decision = Replace()
    assert deployed.enqueue(present(4)) == venturi.Receipt(oldest.id, "replaced")
    deployed.close()


@pytest.mark.conformance(79)
def test_the_oldest_pending_job_is_the_candidate(queue: venturi.Queue) -> None:
    """By creation, however the jobs are scheduled or prioritised."""
    decides(lambda task, existing: Independent())
    first = queue.enqueue(Counter("a", 1), delay=HOUR, priority=Priority.LOW)
    queue.enqueue(Counter("a", 2), priority=Priority.HIGH)
    decides(replaces)
    assert queue.enqueue(Counter("a", 3)).id == first.id


@pytest.mark.conformance(79)
@pytest.mark.parametrize("end", ["claimed", "completed", "dead", "cancelled"])
def test_a_job_that_is_not_pending_is_no_candidate(queue: venturi.Queue, end: str) -> None:
    """While a job runs, and after it has ended in whatever way, its key is free: nothing that comes then is lost.

    Cases 049, 061.
    """
    running, go_on = threading.Event(), threading.Event()

    @queue.handler
    def counter(task: Counter) -> None:
        if task.number == 1:
            running.set()
            go_on.wait(5)
            if end == "dead":
                raise venturi.PermanentError("no")

    first = queue.enqueue(Counter("a", 1))
    if end == "cancelled":
        queue.cancel(first.id)
    else:
        with working(queue, concurrency=1):
            assert running.wait(5)
            during = queue.enqueue(Counter("a", 2)) if end == "claimed" else None
            go_on.set()
            ended(queue, first.id, "completed" if end == "claimed" else end)
            if during is not None:
                assert during.action == "inserted"
                ended(queue, during.id)
    assert given == []
    third = queue.enqueue(Counter("a", 3))
    assert third.action == "inserted"
    assert third.id != first.id


@pytest.mark.conformance(79)
def test_the_next_job_of_a_key_may_run_beside_the_one_that_runs(queue: venturi.Queue) -> None:
    """A key merges pending jobs and is no lock: what was enqueued meanwhile does not wait (case 050)."""
    both = threading.Barrier(2, timeout=5)

    @queue.handler
    def counter(task: Counter) -> None:
        both.wait()

    with working(queue, concurrency=2):
        first = queue.enqueue(Counter("a", 1))
        eventually(lambda: (job := queue.job(first.id)) is not None and job.status == "claimed")
        second = queue.enqueue(Counter("a", 2))
        for receipt in (first, second):
            ended(queue, receipt.id)
    assert second.action == "inserted"


@pytest.mark.conformance(80)
def test_keys_of_other_kinds_and_queues_never_merge(queue: venturi.Queue, dsn: str) -> None:
    """A key belongs to its kind in its queue, as columns and not as joined text (case 059)."""

    @venturi.task("a:b")
    class One:
        def dedup_key(self) -> str:
            return "c"

    @venturi.task("a")
    class Two:
        def dedup_key(self) -> str:
            return "b:c"

    @venturi.task("A")
    class Three:
        def dedup_key(self) -> str:
            return "c"

    other = venturi.Queue(queue.schema + "_b", dsn=dsn)
    other.migrate()
    receipts = [each.enqueue(task) for each in (queue, other) for task in (One(), Two(), Three())]
    receipts += queue.enqueue_many([Counter("c"), Counter("C"), Counter("c ")])
    assert {receipt.action for receipt in receipts} == {"inserted"}
    with psycopg.connect(dsn) as connection:
        connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(other.schema)))
    other.close()


@pytest.mark.conformance(81)
def test_merge_sees_the_pending_job(queue: venturi.Queue) -> None:
    """Once, on the new task, with the existing task, its typed carry, counts, priority, time and history."""
    _pausing(queue)
    with working(queue):
        until(queue, (first := queue.enqueue(Counter("a", 10), priority=Priority.LOW)).id, "paused")
    before = _job(queue, first)
    assert given == []
    asked: list[Counter] = []

    def keeps_asked(task: Counter, existing: Pending[Counter, Seen]) -> Keep:
        asked.append(task)
        return Keep()

    decides(keeps_asked)
    queue.enqueue(Counter("a", 5))
    assert asked == [Counter("a", 5)]
    (existing,) = given
    assert (existing.id, existing.task, existing.carry) == (first.id, Counter("a", 10), Seen(7))
    assert (existing.run_count, existing.failure_count, existing.priority) == (1, 0, Priority.LOW)
    assert existing.visible_at == before.visible_at
    decides(lambda task, existing: [entry.outcome for entry in existing.history] == ["paused", "merged"] and Keep())
    assert queue.enqueue(Counter("a", 5)).action == "kept"


@pytest.mark.conformance(81)
def test_a_carry_that_was_never_set_is_seen_as_its_default(queue: venturi.Queue) -> None:
    """merge() need not tell a job that never ran from one that did."""
    queue.enqueue(Counter("a"))
    queue.enqueue(Counter("a"))
    assert given[0].carry == Seen()


def _pausing(queue: venturi.Queue) -> None:
    """A handler that pauses for an hour and leaves a carry."""

    @queue.handler
    def counter(task: Counter, ctx: venturi.Context[Seen]) -> venturi.Outcome:
        ctx.carry.times = 7
        return Pause(HOUR)


def _job(queue: venturi.Queue, receipt: venturi.Receipt) -> venturi.Job:
    job = queue.job(receipt.id)
    assert job is not None
    return job
