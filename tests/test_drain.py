"""drain: the queued jobs run inside the test's own transaction, by a clock of the test's choosing."""

from __future__ import annotations

import collections.abc as cabc
import datetime as dt
import logging
import threading
import time
import typing as t

import psycopg
import pytest
from fixtures.naming import stable
from fixtures.work import working
from psycopg import rows, sql
from psycopg.pq import TransactionStatus

import venturi
from venturi.testing import Ran, drain, queued

Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[t.Any]]
Behaviour: t.TypeAlias = cabc.Callable[[int, "venturi.Context[list[t.Any], t.Any]"], t.Any]

HOUR = dt.timedelta(hours=1)
SECOND = dt.timedelta(seconds=1)


@venturi.task("drain.step", carry=list[t.Any])
class Step:
    number: int


@venturi.task("drain.unknown")
class Unknown:
    number: int = 0


@pytest.fixture
def conn(connect: Connect) -> psycopg.Connection[t.Any]:
    """The connection of a test of the user's, with a table of the user's."""
    connection = connect()
    connection.execute("CREATE TEMPORARY TABLE written (number int)")
    connection.commit()
    return connection


def handles(queue: venturi.Queue, behaviour: Behaviour, **options: t.Any) -> None:
    """Run every `Step` by calling this with its number and its context."""

    @queue.handler(**options)
    def step(task: Step, ctx: venturi.Context[list[t.Any], t.Any]) -> venturi.Outcome:
        return t.cast(venturi.Outcome, behaviour(task.number, ctx))


def numbers(runs: cabc.Iterable[Ran]) -> list[int]:
    return [run.task.number for run in runs]


def outcomes(runs: cabc.Iterable[Ran]) -> list[str]:
    return [run.outcome for run in runs]


def written(conn: psycopg.Connection[t.Any]) -> list[int]:
    with conn.cursor(row_factory=rows.scalar_row) as cursor:
        return t.cast("list[int]", cursor.execute("SELECT number FROM written ORDER BY number").fetchall())


@pytest.mark.conformance(252)
def test_jobs_run_inside_the_transaction_and_a_rollback_leaves_nothing(
    queue: venturi.Queue, conn: psycopg.Connection[t.Any]
) -> None:
    """They run in order, on this thread, and nobody else ever sees them."""
    threads: list[threading.Thread] = []
    handles(queue, lambda number, ctx: threads.append(threading.current_thread()))
    queue.enqueue_many([Step(1), Step(2)], conn=conn)
    runs = drain(conn, queue=queue)
    assert [(run.task, run.outcome, run.error) for run in runs] == [
        (Step(1), "completed", None),
        (Step(2), "completed", None),
    ]
    assert set(threads) == {threading.current_thread()}
    assert queued(conn, queue=queue) == []
    assert len(queue.jobs(conn=conn, status="completed")) == 2
    assert queue.jobs() == []
    conn.rollback()
    assert queue.jobs(conn=conn) == []


def test_it_begins_a_transaction_and_leaves_it_open(queue: venturi.Queue, conn: psycopg.Connection[t.Any]) -> None:
    """Committed jobs run too, and are pending again after the rollback."""
    handles(queue, lambda number, ctx: None)
    receipt = queue.enqueue(Step(1))
    assert outcomes(drain(conn, queue=queue)) == ["completed"]
    assert conn.info.transaction_status == TransactionStatus.INTRANS
    conn.rollback()
    job = queue.job(receipt.id)
    assert job is not None
    assert (job.status, job.run_count) == ("pending", 0)


@pytest.mark.conformance(252)
def test_the_clock_may_be_ahead_or_an_instant(queue: venturi.Queue, conn: psycopg.Connection[t.Any]) -> None:
    """What is due by then runs, nothing else, and nothing sleeps."""
    handles(queue, lambda number, ctx: None)
    started = time.monotonic()
    for hours in (0, 1, 2, 30):
        queue.enqueue(Step(hours), conn=conn, delay=hours * HOUR)
    assert numbers(drain(conn, queue=queue)) == [0]
    assert numbers(drain(conn, queue=queue, now=HOUR + SECOND)) == [1]
    assert numbers(drain(conn, queue=queue, now=dt.datetime.now(dt.UTC) + 3 * HOUR)) == [2]
    assert numbers(drain(conn, queue=queue, now=dt.datetime(2001, 1, 1, tzinfo=dt.UTC))) == []
    assert numbers(drain(conn, queue=queue, now=dt.timedelta.max)) == [30]
    assert time.monotonic() - started < 5


def test_the_clock_stands_still(queue: venturi.Queue, conn: psycopg.Connection[t.Any]) -> None:
    """Pauses and retries are for a later call, however long the handlers take, and count from the chosen instant."""
    steps = {1: lambda: venturi.Pause(HOUR), 2: lambda: venturi.Pause(SECOND / 100)}

    def behave(number: int, ctx: venturi.Context[list[t.Any], t.Any]) -> t.Any:
        time.sleep(0.02)
        ctx.carry.append(number)
        return steps[number]() if len(ctx.carry) == 1 else None

    handles(queue, behave)
    queue.enqueue_many([Step(1), Step(2)], conn=conn)
    assert outcomes(drain(conn, queue=queue, now=HOUR)) == ["paused", "paused"]
    assert numbers(drain(conn, queue=queue, now=HOUR + SECOND)) == [2]
    assert numbers(drain(conn, queue=queue, now=2 * HOUR - SECOND)) == []
    assert numbers(drain(conn, queue=queue, now=2 * HOUR)) == [1]


def test_what_handlers_enqueue_goes_by_the_same_clock(queue: venturi.Queue, conn: psycopg.Connection[t.Any]) -> None:
    """With conn= or without it runs in the same call, and a delay counts from the chosen instant."""

    def behave(number: int, ctx: venturi.Context[list[t.Any], t.Any]) -> None:
        if number < 3:
            queue.enqueue(Step(number + 1), conn=conn if number % 2 else None)
            queue.enqueue(Step(number + 10), delay=HOUR / 2)
            assert len(ctx.history) == 0

    handles(queue, behave)
    queue.enqueue(Step(1), conn=conn)
    assert numbers(drain(conn, queue=queue, now=HOUR)) == [1, 2, 3]
    assert numbers(drain(conn, queue=queue, now=HOUR + SECOND)) == []
    assert numbers(drain(conn, queue=queue, now=2 * HOUR)) == [11, 12]
    assert queue.jobs() == []


def test_jobs_run_by_priority_and_a_pause_goes_behind_its_peers(
    queue: venturi.Queue, conn: psycopg.Connection[t.Any]
) -> None:
    """HIGH before NORMAL before LOW, oldest first, and jobs that pause at once take turns."""

    def behave(number: int, ctx: venturi.Context[list[t.Any], t.Any]) -> t.Any:
        ctx.carry.append(number)
        return venturi.Pause() if number >= 10 and len(ctx.carry) < 3 else None

    handles(queue, behave)
    for number, priority in enumerate([2, 1, 0, 2, 1, 0], 1):
        queue.enqueue(Step(number), conn=conn, priority=venturi.Priority(priority))
    assert numbers(drain(conn, queue=queue)) == [3, 6, 2, 5, 1, 4]
    queue.enqueue_many([Step(10), Step(11)], conn=conn)
    assert numbers(drain(conn, queue=queue)) == [10, 11] * 3


def test_a_failure_takes_back_what_the_handler_wrote(
    queue: venturi.Queue, conn: psycopg.Connection[t.Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Its writes and its jobs are gone, its carry and evidence are stored, and its error is told and logged."""

    def behave(number: int, ctx: venturi.Context[list[t.Any], t.Any]) -> None:
        conn.execute("INSERT INTO written VALUES (%s)", (number,))
        ctx.carry.append(number)
        ctx.attach(number=number)
        if number == 1:
            queue.enqueue(Step(9))
            raise LookupError("no such user")

    handles(queue, behave)
    failing, other = queue.enqueue_many([Step(1), Step(2)], conn=conn)
    with caplog.at_level(logging.WARNING, "venturi.testing"):
        first, second = drain(conn, queue=queue)
    assert (first.outcome, first.note, second.outcome) == ("retried", "LookupError: no such user", "completed")
    assert isinstance(first.error, LookupError)
    assert "in behave" in caplog.text
    assert written(conn) == [2]
    job = queue.job(failing.id, conn=conn)
    assert job is not None
    assert (job.carry, job.failure_count) == ([1], 1)
    assert queue.journal(failing.id, conn=conn)[0].evidence == {"number": 1}
    assert queued(conn, queue=queue) == [Step(1)]
    assert other.id == second.id


def test_a_job_can_be_taken_through_its_retries(queue: venturi.Queue, conn: psycopg.Connection[t.Any]) -> None:
    """Call by call with a later clock, to the end of its failures; dead_on and PermanentError end it at once."""

    def behave(number: int, ctx: venturi.Context[list[t.Any], t.Any]) -> None:
        raise [LookupError, ValueError, venturi.PermanentError][number]

    handles(queue, behave, dead_on=(ValueError,))
    for number in (0, 1, 2):
        queue.enqueue(Step(number), conn=conn)
    assert outcomes(drain(conn, queue=queue, backstop=3)) == ["retried", "dead", "dead"]
    assert outcomes(drain(conn, queue=queue, backstop=3)) == []
    assert outcomes(drain(conn, queue=queue, backstop=3, now=HOUR)) == ["retried"]
    assert outcomes(drain(conn, queue=queue, backstop=3, now=2 * HOUR)) == ["dead"]
    assert len(queue.jobs(conn=conn, status="dead")) == 3


def test_jobs_without_end_are_an_error_that_says_so(queue: venturi.Queue, conn: psycopg.Connection[t.Any]) -> None:
    """It names the kind, leaves no job claimed and nothing prepared; a queue that is empty at the bound is fine."""
    handles(queue, lambda number, ctx: queue.enqueue(Step(number + 1)) and None)
    queue.enqueue(Step(1), conn=conn)
    with pytest.raises(AssertionError, match=r"still due after 20 runs, most of them of the kind 'drain\.step'"):
        drain(conn, queue=queue, limit=20)
    assert queued(conn, queue=queue) == [Step(21)]
    assert conn.execute("SELECT count(*) FROM pg_prepared_statements").fetchone() == (0,)
    queue.cancel(queue.jobs(conn=conn, status="pending")[0].id, conn=conn)
    assert drain(conn, queue=queue, limit=1) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, pytest.fail.Exception])
def test_what_is_no_exception_reaches_the_test(
    queue: venturi.Queue, conn: psycopg.Connection[t.Any], error: type[BaseException]
) -> None:
    """Ctrl-C and pytest.fail() in a stand-in end the test; the run is recorded as the failure it would be."""

    def behave(number: int, ctx: venturi.Context[list[t.Any], t.Any]) -> None:
        conn.execute("INSERT INTO written VALUES (1)")
        raise error("stop")

    handles(queue, behave)
    receipt = queue.enqueue(Step(1), conn=conn)
    with pytest.raises(error):
        drain(conn, queue=queue)
    assert [entry.outcome for entry in queue.journal(receipt.id, conn=conn)] == ["retried"]
    assert written(conn) == []


def test_what_a_worker_would_pass_over_is_left_pending(
    queue: venturi.Queue, conn: psycopg.Connection[t.Any], connect: Connect
) -> None:
    """Unknown kinds, cancelled jobs, and those that a worker runs or another transaction holds."""
    running, go_on = threading.Event(), threading.Event()

    def behave(number: int, ctx: venturi.Context[list[t.Any], t.Any]) -> None:
        running.set()
        go_on.wait(10)

    handles(queue, behave)
    claimed = queue.enqueue(Step(1))
    with working(queue, concurrency=1):
        assert running.wait(5)
        queue.enqueue(Unknown(), conn=conn)
        cancelled = queue.enqueue(Step(2), conn=conn)
        assert queue.cancel(cancelled.id, conn=conn)
        held = queue.enqueue(Step(3), delay=HOUR)
        holder = connect()
        holder.execute(sql.SQL("SELECT 1 FROM {} WHERE id = %s FOR UPDATE").format(_live(queue)), (held.id,))
        assert drain(conn, queue=queue, now=2 * HOUR) == []
        holder.rollback()
        conn.rollback()
        go_on.set()
    job = queue.job(claimed.id)
    assert job is not None
    assert (job.status, job.run_count) == ("completed", 1)


def test_a_job_that_cannot_be_decoded_fails_as_in_a_worker(
    queue: venturi.Queue, conn: psycopg.Connection[t.Any]
) -> None:
    """It is retried later, without its task, and the others run."""
    handles(queue, lambda number, ctx: None)
    queue.enqueue_many([Step(1), Step(2)], conn=conn)
    body = sql.Identifier(queue.schema, "jobs")
    conn.execute(sql.SQL("UPDATE {} SET payload = '[]' WHERE payload->>'number' = '1'").format(body))
    broken, fine = drain(conn, queue=queue)
    assert (broken.task, broken.outcome, broken.error) == (None, "retried", None)
    assert (fine.task, fine.outcome) == (Step(2), "completed")


def test_a_job_that_cancels_itself_never_runs_again(queue: venturi.Queue, conn: psycopg.Connection[t.Any]) -> None:
    """A request of its own handler takes effect when the run has paused."""

    def behave(number: int, ctx: venturi.Context[list[t.Any], t.Any]) -> venturi.Outcome:
        assert queue.cancel(ctx.id)
        return venturi.Pause()

    handles(queue, behave)
    receipt = queue.enqueue(Step(1), conn=conn)
    assert outcomes(drain(conn, queue=queue)) == ["paused"]
    assert [entry.outcome for entry in queue.journal(receipt.id, conn=conn)] == ["paused", "cancelled"]


def test_a_handler_may_use_savepoints_and_swallow_errors_of_the_database(
    queue: venturi.Queue, conn: psycopg.Connection[t.Any]
) -> None:
    """A commit is refused and so a failure; a transaction that it left broken counts for nothing, as in production."""

    def behave(number: int, ctx: venturi.Context[list[t.Any], t.Any]) -> None:
        conn.execute("INSERT INTO written VALUES (%s)", (number,))
        if number == 1:
            with pytest.raises(psycopg.errors.DivisionByZero), conn.transaction():
                conn.execute("SELECT 1 / 0")
        elif number == 2:
            with pytest.raises(psycopg.errors.DivisionByZero):
                conn.execute("SELECT 1 / 0")
        else:
            conn.commit()

    handles(queue, behave)
    queue.enqueue_many([Step(1), Step(2), Step(3)], conn=conn)
    runs = drain(conn, queue=queue)
    assert outcomes(runs) == ["completed", "completed", "retried"]
    assert isinstance(runs[2].error, psycopg.ProgrammingError)
    assert written(conn) == [1]


@pytest.mark.parametrize(
    "options",
    [
        {"row_factory": rows.dict_row},
        {"row_factory": rows.scalar_row},
        {"cursor_factory": psycopg.RawCursor},
        {"cursor_factory": psycopg.ClientCursor},
        {"prepare_threshold": 0},
        {"prepare_threshold": None},
    ],
    ids=stable,
)
def test_any_connection_will_do_and_is_left_as_it_was(
    queue: venturi.Queue, connect: Connect, options: dict[str, t.Any]
) -> None:
    """Row factory, cursor class and prepared statements are the test's own."""
    caller = connect(**options)

    def behave(number: int, ctx: venturi.Context[list[t.Any], t.Any]) -> None:
        if number < 3:
            queue.enqueue(Step(number + 1))

    handles(queue, behave)
    queue.enqueue(Step(1), conn=caller)
    before = (caller.row_factory, caller.cursor_factory, caller.prepare_threshold, caller.autocommit)
    assert numbers(drain(caller, queue=queue)) == [1, 2, 3]
    assert queued(caller, queue=queue) == []
    assert (caller.row_factory, caller.cursor_factory, caller.prepare_threshold, caller.autocommit) == before


def test_a_connection_in_autocommit_mode_needs_a_transaction(queue: venturi.Queue, connect: Connect) -> None:
    """Without one a rollback could take nothing back, so that nothing runs; inside one all is well."""
    caller = connect(autocommit=True)
    handles(queue, lambda number, ctx: None)
    with pytest.raises(venturi.ConfigError, match=r"with conn\.transaction\(\)"):
        drain(caller, queue=queue)
    with caller.transaction(force_rollback=True):
        queue.enqueue(Step(1), conn=caller)
        assert outcomes(drain(caller, queue=queue)) == ["completed"]
    assert queue.jobs() == []


def test_options_are_checked_before_anything_runs(queue: venturi.Queue, conn: psycopg.Connection[t.Any]) -> None:
    """What is wrong is named: no handlers, a bound below one, a naive instant, no connection."""
    with pytest.raises(venturi.ConfigError, match="no handlers"):
        drain(conn, queue=queue)
    handles(queue, lambda number, ctx: None)
    wrong: list[tuple[dict[str, t.Any], type[Exception]]] = [
        ({"limit": 0}, venturi.ConfigError),
        ({"backstop": 0}, venturi.ConfigError),
        ({"now": dt.datetime(2030, 1, 1)}, venturi.ConfigError),
        ({"now": 60}, TypeError),
    ]
    for options, error in wrong:
        with pytest.raises(error, match=next(iter(options))):
            drain(conn, queue=queue, **options)
    with pytest.raises(TypeError, match="psycopg"):
        drain(t.cast(t.Any, "dsn"), queue=queue)


def test_handlers_get_the_state(queue: venturi.Queue, conn: psycopg.Connection[t.Any]) -> None:
    """The very object, as from work(state=)."""
    state: list[int] = []
    handles(queue, lambda number, ctx: ctx.state.append(number))
    queue.enqueue(Step(1), conn=conn)
    drain(conn, queue=queue, state=state)
    assert state == [1]


def _live(queue: venturi.Queue) -> sql.Identifier:
    return sql.Identifier(queue.schema, "live")
