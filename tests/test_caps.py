"""Slots and caps: how many handlers run at once, on which threads, and what they see of each other."""

from __future__ import annotations

import collections.abc as cabc
import contextlib
import contextvars
import ctypes
import os
import threading
import time
import typing as t

import attrs
import psycopg
import pytest
from fixtures.serverlog import ServerLog
from fixtures.waiting import eventually
from fixtures.work import ended, parked, until, working
from psycopg import sql

import venturi
from venturi import Priority, codec
from venturi.store.sql import ANY, Sql
from venturi.worker.settings import Settings

Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[tuple[t.Any, ...]]]

threads: set[str] = set()
"""Names of the threads on which converters and codecs of these tests ran."""


def seen(value: t.Any) -> t.Any:
    """Note the thread."""
    threads.add(threading.current_thread().name)
    return value


def explosive(value: str) -> str:
    """A converter that would end the interpreter, but not where jobs are enqueued."""
    if value == "boom" and threading.current_thread() is not threading.main_thread():
        raise SystemExit(3)
    return value


@attrs.frozen
class Money:
    """A type that user code encodes and decodes."""

    amount: str = "0"


def write_money(money: Money) -> str:
    """Encode."""
    return t.cast(str, seen(money.amount))


def read_money(data: t.Any, _: object) -> Money:
    """Decode."""
    return Money(seen(data))


codec.converter.register_unstructure_hook(Money, write_money)
codec.converter.register_structure_hook(Money, read_money)


@attrs.define
class Purse:
    """A carry."""

    money: Money = attrs.field(factory=Money)


@venturi.task("caps.step", aliases=("caps.stride",))
class Step:
    number: int = 0


@venturi.task("caps.other")
class Other:
    number: int = 0


@venturi.task("caps.price", carry=Purse)
class Price:
    money: Money


@venturi.task("caps.fragile")
class Fragile:
    text: str = attrs.field(converter=explosive)


class Gauge:
    """Counts how many are inside at once, and keeps them there until it is opened."""

    def __init__(self, *, opened: bool = False) -> None:
        self.most = 0
        self.entered = 0
        self._now = 0
        self._opened = opened
        self._state = threading.Condition()

    def pass_through(self) -> None:
        """Go in, wait until it is open, and leave."""
        with self._state:
            self._now += 1
            self.entered += 1
            self.most = max(self.most, self._now)
            self._state.notify_all()
            assert self._state.wait_for(lambda: self._opened, 10)
        time.sleep(0.001)  # give others the chance to be inside too
        with self._state:
            self._now -= 1

    def wait(self, entered: int) -> None:
        """Wait until so many have gone in."""
        with self._state:
            assert self._state.wait_for(lambda: self.entered >= entered, 5), self.entered

    def open(self) -> None:
        """Let everybody out."""
        with self._state:
            self._opened = True
            self._state.notify_all()


def gauged(queue: venturi.Queue, *, cap: int | None = None, opened: bool = False) -> Gauge:
    """A handler of steps that passes through a gauge."""
    gauge = Gauge(opened=opened)
    queue.handler(task=Step, cap=cap)(lambda task: gauge.pass_through())
    return gauge


@pytest.mark.conformance(104)
def test_no_more_handlers_run_at_once_than_there_are_slots(queue: venturi.Queue) -> None:
    """Six jobs at concurrency 2: two run at once, never more, and all complete."""
    gauge = gauged(queue)
    ids = [receipt.id for receipt in queue.enqueue_many([Step(n) for n in range(6)])]
    with working(queue, concurrency=2):
        gauge.wait(2)
        gauge.open()
        for id_ in ids:
            ended(queue, id_)
    assert (gauge.most, gauge.entered) == (2, 6)


@pytest.mark.conformance(104)
def test_one_slot_runs_strictly_one_after_another(queue: venturi.Queue) -> None:
    """Concurrency 1: never two at once."""
    gauge = gauged(queue, opened=True)
    ids = [receipt.id for receipt in queue.enqueue_many([Step(n) for n in range(6)])]
    with working(queue, concurrency=1):
        for id_ in ids:
            ended(queue, id_)
    assert (gauge.most, gauge.entered) == (1, 6)


@pytest.mark.conformance(105)
@pytest.mark.parametrize(("cores", "slots"), [(1, 1), (2, 1), (4, 2), (7, 3), (64, 8), (None, 1)])
def test_the_default_is_half_the_cores(monkeypatch: pytest.MonkeyPatch, cores: int | None, slots: int) -> None:
    """Default concurrency is max(1, min(8, cores // 2))."""
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert Settings.of({}).concurrency == slots


@pytest.mark.conformance(106)
def test_user_code_runs_on_slot_threads_only(queue: venturi.Queue) -> None:
    """Decoding, handler and encoding never run on the coordinator, the listener or the maintainer."""

    @queue.handler
    def handle(task: Price, ctx: venturi.Context[Purse]) -> venturi.Outcome:
        seen(None)
        ctx.carry.money = Money("8")
        return venturi.Pause() if ctx.run_count == 1 else None

    id_ = queue.enqueue(Price(Money("7"))).id
    threads.clear()
    with working(queue, concurrency=1):
        ended(queue, id_)
    assert len(threads) == 1
    assert threads.pop().startswith(f"venturi-{queue.schema}")


@pytest.mark.conformance(107)
def test_a_converter_that_exits_fails_its_run_alone_and_at_once(queue: venturi.Queue) -> None:
    """A SystemExit out of decoding is a failure of that run, settled at once; the other runs go on (case 023)."""
    queue.handler(task=Fragile)(lambda task: None)
    bad = queue.enqueue(Fragile("boom")).id
    good = [receipt.id for receipt in queue.enqueue_many([Fragile("fine")] * 4)]
    with working(queue, concurrency=1, lease=60):
        (entry,) = until(queue, bad, "retried")
        for id_ in good:
            ended(queue, id_)
    assert entry.note is not None
    assert "SystemExit" in entry.note
    assert entry.failure_count == 1


@pytest.mark.conformance(108)
def test_a_context_variable_of_one_run_is_not_seen_by_the_next(queue: venturi.Queue) -> None:
    """The next run on the same slot starts without it (case 028)."""
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable")
    found: list[int | None] = []

    @queue.handler
    def handle(task: Step) -> None:
        found.append(variable.get(None))
        variable.set(task.number)

    ids = [receipt.id for receipt in queue.enqueue_many([Step(1), Step(2), Step(3)])]
    with working(queue, concurrency=1):
        for id_ in ids:
            ended(queue, id_)
    assert found == [None, None, None]


@pytest.mark.conformance(109)
def test_no_connection_is_idle_in_transaction_while_a_handler_runs(queue: venturi.Queue, connect: Connect) -> None:
    """The worker's connections hold no transaction while user code runs (case 047)."""
    watch = connect(autocommit=True)
    gauge = gauged(queue)
    id_ = queue.enqueue(Step()).id
    with working(queue, lease=1):
        gauge.wait(1)
        for _ in range(20):
            states = watch.execute(
                "SELECT application_name, state FROM pg_stat_activity WHERE datname = current_database() "
                "AND application_name LIKE 'venturi%' AND state LIKE 'idle in transaction%'"
                "AND state_change < clock_timestamp() - interval '20 ms'"
            ).fetchall()
            assert states == []
        names = watch.execute("SELECT application_name FROM pg_stat_activity WHERE application_name LIKE 'venturi%'")
        assert {"venturi coordinator", "venturi maintainer"} <= {name for (name,) in names}
        gauge.open()
        ended(queue, id_)


@pytest.mark.conformance(110)
def test_a_cap_holds_per_worker_and_all_jobs_run(queue: venturi.Queue, dsn: str) -> None:
    """cap=2 at concurrency 8: two runs at once in each of two workers, and all eight jobs run (case 098)."""
    gauge = gauged(queue, cap=2)
    ids = [receipt.id for receipt in queue.enqueue_many([Step(n) for n in range(8)])]
    with contextlib.ExitStack() as stack:
        stack.enter_context(working(queue, concurrency=8))
        gauge.wait(2)
        held = queue.stats().kinds["caps.step"].claimed
        stack.enter_context(working(queue, concurrency=8))
        gauge.wait(4)
        both = queue.stats().kinds["caps.step"].claimed
        gauge.open()
        for id_ in ids:
            ended(queue, id_)
    assert (held, both) == (2, 4)
    assert (gauge.most, gauge.entered) == (4, 8)


@pytest.mark.conformance(110)
def test_a_cap_counts_aliases_and_tiers_together(queue: venturi.Queue, connect: Connect) -> None:
    """Jobs under the kind's former name and in other tiers share the cap, also within one claim."""
    gauge = gauged(queue, cap=3, opened=True)
    ids = [
        queue.enqueue(Step(n), priority=tier).id
        for n in range(5)
        for tier in (Priority.HIGH, Priority.NORMAL, Priority.LOW)
    ]
    connection = connect(autocommit=True)
    for table in ("jobs", "live"):
        connection.execute(
            sql.SQL("UPDATE {} SET kind = 'caps.stride' WHERE id = ANY (%s)").format(
                sql.Identifier(queue.schema, table)
            ),
            (ids[::2],),
        )
    with working(queue, concurrency=8):
        for id_ in ids:
            ended(queue, id_)
    assert gauge.entered == 15
    assert gauge.most <= 3


@pytest.mark.conformance(111)
def test_jobs_of_a_kind_at_its_cap_stay_pending_for_others(queue: venturi.Queue, dsn: str) -> None:
    """They are not claimed ahead; another worker takes them, and other kinds go on being claimed (case 095)."""
    capped = gauged(queue, cap=1)
    queue.handler(task=Other)(lambda task: None)
    steps = [receipt.id for receipt in queue.enqueue_many([Step(n) for n in range(3)])]
    with working(queue, concurrency=4):
        capped.wait(1)
        ended(queue, queue.enqueue(Other()).id)
        assert [job.status for job in map(queue.job, steps) if job] == ["claimed", "pending", "pending"]
        second = venturi.Queue(queue.schema, dsn=dsn)
        free = gauged(second, opened=True)
        with working(second):
            ended(second, steps[1])
            ended(second, steps[2])
        second.close()
        capped.open()
        ended(queue, steps[0])
    assert (capped.entered, free.entered) == (1, 2)


@pytest.mark.conformance(111)
def test_a_full_cap_costs_hardly_any_claims(schema: str, server_log: ServerLog, connect: Connect) -> None:
    """While jobs wait for the cap of their kind the worker claims at most twice a second (case 096)."""
    queue = venturi.Queue(schema, dsn=server_log.dsn)
    gauge = gauged(queue, cap=1)
    queue.handler(task=Other)(lambda task: None)
    ids = [receipt.id for receipt in queue.enqueue_many([Step(n) for n in range(5)])]
    with working(queue, concurrency=8, poll=60):
        gauge.wait(1)
        parked(connect(autocommit=True))
        server_log.clear()
        time.sleep(1.0)
        claims = server_log.statements("SET owner = ")
        gauge.open()
        for id_ in ids:
            ended(queue, id_)
    queue.close()
    assert len(claims) <= 2


@pytest.mark.conformance(111)
def test_a_full_cap_costs_hardly_any_claims_while_more_jobs_of_it_come(
    schema: str, dsn: str, server_log: ServerLog, connect: Connect
) -> None:
    """They are announced by others, and wait; a job of another kind is started at once all the same (case 096)."""
    queue, producer = venturi.Queue(schema, dsn=server_log.dsn), venturi.Queue(schema, dsn=dsn)
    gauge = gauged(queue, cap=1)
    queue.handler(task=Other)(lambda task: None)
    with working(queue, concurrency=4, poll=60):
        ids = [producer.enqueue(Step(0)).id]
        gauge.wait(1)
        parked(connect(autocommit=True))
        server_log.clear()
        for number in range(1, 51):
            ids.append(producer.enqueue(Step(number)).id)
            time.sleep(0.02)
        claims = server_log.statements("SET owner = ")
        asked = time.monotonic()
        ended(producer, producer.enqueue(Other()).id)
        assert time.monotonic() - asked < 0.2
        gauge.open()
        for id_ in ids:
            ended(queue, id_)
    queue.close()
    producer.close()
    assert len(claims) <= 2


def test_an_exception_from_another_thread_that_comes_too_late_costs_no_slot(
    queue: venturi.Queue, caplog: pytest.LogCaptureFixture
) -> None:
    """As a timeout by such exceptions does to a thread whose handler has just ended; it is logged (case 025)."""
    idents: list[int] = []
    queue.handler(task=Other)(lambda task: idents.append(threading.get_ident()))
    with working(queue, concurrency=1):
        ended(queue, queue.enqueue(Other()).id)
        for _ in range(3):
            assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(idents[0]), ctypes.py_object(TimeoutError))
            ended(queue, queue.enqueue(Other()).id)
        late = [record for record in caplog.records if "has met no handler" in record.getMessage()]
    assert len({*idents}) == 1
    assert len(late) == 3
    assert late[0].exc_info is not None
    assert late[0].exc_info[0] is TimeoutError


@pytest.mark.parametrize(("concurrency", "cap", "most"), [(4, 1, 24), (1, None, 0)], ids=["cap", "slots"])
def test_a_storm_of_notifications_costs_a_full_worker_few_claims(
    schema: str, server_log: ServerLog, connect: Connect, concurrency: int, cap: int | None, most: int
) -> None:
    """Woken in vain two hundred times a second it looks about five times, or never without a free slot (case 096)."""
    queue = venturi.Queue(schema, dsn=server_log.dsn)
    gauge = gauged(queue, cap=cap)
    queue.handler(task=Other)(lambda task: None)
    ids = [receipt.id for receipt in queue.enqueue_many([Step(n) for n in range(5)])]
    with working(queue, concurrency=concurrency, poll=60), connect(autocommit=True) as connection:
        gauge.wait(1)
        time.sleep(0.2)
        server_log.clear()
        for _ in range(200):
            connection.execute("SELECT pg_notify(%s, %s)", [Sql(schema).channel, ANY])
            time.sleep(0.005)
        claims = server_log.statements("SET owner = ")
        gauge.open()
        for id_ in ids:
            ended(queue, id_)
    queue.close()
    assert len(claims) <= most


def test_a_capped_job_whose_row_is_locked_when_it_ends_disturbs_nothing(
    queue: venturi.Queue, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """Its successor may start before it is settled; the worker goes on, and settles it when the lock is gone."""
    gauge = gauged(queue, cap=1)
    queue.handler(task=Other)(lambda task: None)
    first, second = (receipt.id for receipt in queue.enqueue_many([Step(1), Step(2)]))
    holder = connect()
    with working(queue, concurrency=4):
        gauge.wait(1)
        lock = sql.SQL("SELECT FROM {}.live WHERE id = %s FOR UPDATE").format(sql.Identifier(queue.schema))
        holder.execute(lock, (first,))
        gauge.open()
        gauge.wait(2)
        ended(queue, second)
        ended(queue, queue.enqueue(Other()).id)
        holder.rollback()
        ended(queue, first)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []
    eventually(lambda: gauge.entered == 2)
