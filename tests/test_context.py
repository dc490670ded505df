"""What a handler sees of its run, and what it can say."""

from __future__ import annotations

import datetime as dt
import logging
import threading
import time
import typing as t
import uuid

import attrs
import psycopg
import pytest
from fixtures.proxy import Proxy
from fixtures.work import ended, until, working

import venturi
from venturi.context import Cancellation, RunSignal
from venturi.store import pool

INSTANTLY = dt.timedelta(0)
FAR = 1e9
"""Seconds, as an end of a lease that no test reaches."""


@attrs.define
class Page:
    number: int = 0
    seen: list[int] = attrs.Factory(list[int])


@venturi.task("context.plain")
class Plain:
    pass


@venturi.task("context.paged", carry=Page)
class Paged:
    way: str = ""


@venturi.task("context.brief", timeout=10)
class Brief:
    pass


@pytest.mark.conformance(136)
def test_a_handler_sees_its_job_and_its_logger_tags_the_records(
    queue: venturi.Queue, caplog: pytest.LogCaptureFixture
) -> None:
    """The id on every run, kind, counts, state, and a logger whose records carry job id, kind and run number."""
    state = object()
    seen: list[tuple[t.Any, ...]] = []

    @queue.handler
    def handle(task: Plain, ctx: venturi.Context) -> None:
        seen.append((ctx.id, ctx.kind, ctx.run_count, ctx.failure_count, ctx.state))
        ctx.logger.warning("at work", extra={"page": 7})
        if ctx.run_count < 3:
            raise venturi.RetryLater(INSTANTLY)

    id_ = queue.enqueue(Plain()).id
    with caplog.at_level(logging.WARNING), working(queue, state=state):
        ended(queue, id_)
    assert seen == [(id_, "context.plain", n, n - 1, state) for n in (1, 2, 3)]
    records = [record for record in caplog.records if record.getMessage() == "at work"]
    tags = [tuple(getattr(record, name) for name in ("job", "kind", "run", "page")) for record in records]
    assert tags == [(str(id_), "context.plain", n, 7) for n in (1, 2, 3)]


@pytest.mark.conformance(137)
@pytest.mark.parametrize("assigned", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_carry_is_the_same_to_pause_and_retry_changed_or_assigned(
    queue: venturi.Queue, assigned: bool, fails: bool
) -> None:
    """The declared type's default on a first run, and a fresh object on each."""
    seen: list[Page] = []

    @queue.handler
    def handle(task: Paged, ctx: venturi.Context[Page]) -> venturi.Outcome:
        seen.append(attrs.evolve(ctx.carry, seen=list(ctx.carry.seen)))
        if ctx.run_count == 3:
            return None
        if assigned:
            ctx.carry = Page(ctx.carry.number + 1, [*ctx.carry.seen, ctx.run_count])
        else:
            ctx.carry.number += 1
            ctx.carry.seen.append(ctx.run_count)
        if fails:
            raise venturi.RetryLater(INSTANTLY)
        return venturi.Pause()

    first, second = (receipt.id for receipt in queue.enqueue_many([Paged(), Paged()]))
    with working(queue, concurrency=1):
        ended(queue, first)
        ended(queue, second)
    assert sorted(seen, key=lambda page: page.number) == [
        page for page in (Page(0, []), Page(1, [1]), Page(2, [1, 2])) for _ in range(2)
    ]


@pytest.mark.conformance(137)
def test_a_task_without_a_carry_type_has_none(queue: venturi.Queue) -> None:
    """ctx.carry is None then."""
    seen: list[object] = []
    queue.handler(task=Plain)(lambda task, ctx: seen.append(ctx.carry))
    id_ = queue.enqueue(Plain()).id
    with working(queue):
        ended(queue, id_)
    assert seen == [None]


@pytest.mark.conformance(138)
def test_a_carry_of_none_comes_back_as_none(queue: venturi.Queue) -> None:
    """Never set and set to None differ."""
    seen: list[Page | None] = []

    @queue.handler(task=Paged)
    def handle(task: Paged, ctx: venturi.Context[t.Any]) -> venturi.Outcome:
        seen.append(ctx.carry)
        ctx.carry = None
        return venturi.Pause() if ctx.run_count == 1 else None

    id_ = queue.enqueue(Paged()).id
    with working(queue):
        ended(queue, id_)
    assert seen == [Page(), None]


@pytest.mark.conformance(139)
def test_what_is_attached_later_wins(queue: venturi.Queue) -> None:
    """attach(a=1), then attach(b=2, a=3) records both keys, with the later value."""

    @queue.handler
    def handle(task: Plain, ctx: venturi.Context) -> None:
        ctx.attach(a=1)
        ctx.attach(b=2, a=3)

    id_ = queue.enqueue(Plain()).id
    with working(queue):
        (entry,) = until(queue, id_, "completed")
    assert entry.evidence == {"a": 3, "b": 2}


@pytest.mark.conformance(140)
def test_history_is_read_once_and_when_asked(queue: venturi.Queue, dsn: str, server_log: t.Any) -> None:
    """No query until it is read, then one; after two failures exactly those two."""
    watched = venturi.Queue(queue.schema, dsn=server_log.dsn)
    seen: list[list[venturi.Entry]] = []
    queries: list[int] = []

    def count() -> None:
        queries.append(len(server_log.statements("all_entries")))

    @watched.handler
    def handle(task: Plain, ctx: venturi.Context) -> None:
        if ctx.run_count < 3:
            raise venturi.RetryLater(INSTANTLY)
        count()
        seen.append(ctx.history)
        count()
        assert ctx.history is seen[0]
        count()

    server_log.clear()
    id_ = queue.enqueue(Plain()).id
    with working(watched):
        ended(queue, id_)
    watched.close()
    assert queries == [0, 1, 1]
    assert [(entry.outcome, entry.run_no) for entry in seen[0]] == [("retried", 1), ("retried", 2)]


@pytest.mark.conformance(140)
def test_history_holds_the_newest_fifty_entries_oldest_first(queue: venturi.Queue) -> None:
    """Of more than fifty entries the oldest are left out."""
    runs: list[int] = []

    @queue.handler
    def handle(task: Plain, ctx: venturi.Context) -> venturi.Outcome:
        if ctx.run_count <= 55:
            return venturi.Pause()
        runs.extend(entry.run_no for entry in ctx.history)
        return None

    id_ = queue.enqueue(Plain()).id
    with working(queue):
        ended(queue, id_)
    assert runs == list(range(6, 56))


@pytest.mark.conformance(141)
def test_history_raises_while_the_database_is_away(
    queue: venturi.Queue, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never reads as empty; the failure_count needs no query."""
    monkeypatch.setattr(pool, "POOL_SECONDS", 0.3)
    distant = venturi.Queue(queue.schema, dsn=proxy.dsn)
    seen: list[object] = []

    @distant.handler
    def handle(task: Plain, ctx: venturi.Context) -> None:
        if ctx.run_count == 1:
            raise venturi.RetryLater(INSTANTLY)
        proxy.refuse()
        proxy.cut()
        seen.append(ctx.failure_count)
        try:
            seen.append(ctx.history)
        except psycopg.OperationalError:
            seen.append("raised")
        proxy.resume()

    id_ = queue.enqueue(Plain()).id
    with working(distant):
        ended(queue, id_)
    distant.close()
    assert seen == [1, "raised"]


@pytest.mark.conformance(142)
def test_a_cancellation_has_a_reason_and_the_first_one_stays() -> None:
    """is_set(), wait(), reason and check() say nothing until it is told, and then all the same."""
    signal = RunSignal(FAR + time.monotonic())
    cancelled = Cancellation(signal)
    assert (cancelled.is_set(), cancelled.wait(0), cancelled.reason) == (False, False, None)
    cancelled.check()
    signal.tell("operator")
    signal.tell("shutdown")
    assert (cancelled.is_set(), cancelled.wait(60), cancelled.reason) == (True, True, "operator")
    with pytest.raises(venturi.Cancelled) as caught:
        cancelled.check()
    assert (caught.value.reason, type(caught.value)) == ("operator", venturi.Cancelled)


@pytest.mark.conformance(142, 160)
def test_a_lost_lease_raises_an_error_of_its_own() -> None:
    """check() raises LeaseLost when the lease is over by the monotonic clock, without anybody telling."""
    cancelled = Cancellation(RunSignal(time.monotonic() + 0.05))
    assert not cancelled.is_set()
    assert cancelled.wait(60)
    with pytest.raises(venturi.LeaseLost) as caught:
        cancelled.check()
    assert caught.value.reason == "lease lost"


@pytest.mark.conformance(142)
def test_waiting_for_a_cancellation_ends_with_its_timeout() -> None:
    """wait(timeout) gives False when nothing was told in time."""
    began = time.monotonic()
    assert not Cancellation(RunSignal(FAR + time.monotonic())).wait(0.03)
    assert 0.03 <= time.monotonic() - began < 1


def test_waiting_for_no_number_is_refused() -> None:
    """NaN is no time that could be over."""
    with pytest.raises(venturi.ConfigError, match="timeout=nan"):
        Cancellation(RunSignal(FAR + time.monotonic())).wait(float("nan"))


@pytest.mark.conformance(143)
def test_a_waiting_handler_hears_of_a_stop_at_once(queue: venturi.Queue) -> None:
    """ctx.cancelled.wait(60) returns true within 100 ms of worker.stop()."""
    started = threading.Event()
    heard: list[tuple[bool, str | None, float]] = []

    @queue.handler
    def handle(task: Plain, ctx: venturi.Context) -> None:
        started.set()
        told = ctx.cancelled.wait(60)
        heard.append((told, ctx.cancelled.reason, time.monotonic()))

    queue.enqueue(Plain())
    with working(queue) as worker:
        assert started.wait(5)
        stopped = time.monotonic()
        worker.stop()
        worker.join(5)
    ((told, reason, at),) = heard
    assert (told, reason) == (True, "shutdown")
    assert at - stopped < 0.1


@pytest.mark.conformance(144)
def test_the_time_that_remains_falls_to_zero(queue: venturi.Queue) -> None:
    """None without a timeout; else from the timeout down, by the monotonic clock, and never below zero."""
    remaining: list[dt.timedelta | None] = []

    @queue.handler
    def plain(task: Plain, ctx: venturi.Context) -> None:
        remaining.append(ctx.time_remaining)

    @queue.handler
    def brief(task: Brief, ctx: venturi.Context) -> None:
        before = time.monotonic()
        remaining.append(ctx.time_remaining)
        time.sleep(0.03)
        remaining.append(ctx.time_remaining)
        remaining.append(dt.timedelta(seconds=time.monotonic() - before))

    ids = [queue.enqueue(Plain()).id]
    with working(queue, concurrency=1):
        ended(queue, ids[0])
        ended(queue, queue.enqueue(Brief()).id)
    assert remaining[0] is None
    first, second, passed = (each for each in remaining[1:] if each is not None)
    assert dt.timedelta(seconds=9) < first <= dt.timedelta(seconds=10)
    assert dt.timedelta(seconds=0.03) <= first - second <= passed


@pytest.mark.conformance(144)
def test_no_time_remains_after_the_timeout() -> None:
    """It is zero then, not negative."""
    signal = RunSignal(FAR + time.monotonic())
    signal.timeout_at = time.monotonic() - 5
    context = venturi.Context[None, None](
        id=uuid.uuid4(), kind="k", run_count=1, failure_count=0, carry=None, state=None, signal=signal, evidence={},
        history=list,
    )  # fmt: skip
    assert context.time_remaining == dt.timedelta(0)
    assert context.cancelled.reason == "timeout"
