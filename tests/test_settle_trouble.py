"""Settling while something is in the way: another transaction, a cut connection, a refusing database."""

from __future__ import annotations

import collections.abc as cabc
import logging
import threading
import time
import typing as t
import uuid

import psycopg
import pytest
from fixtures.blocking import held_up
from fixtures.claims import claim, claiming, completed, fill
from fixtures.proxy import Proxy
from fixtures.sqltext import on
from fixtures.waiting import eventually
from fixtures.work import ended, until, working
from psycopg import sql

import venturi
from venturi.store import connections
from venturi.store.claiming import Ask, Claiming, Ending, Turn
from venturi.store.connections import Session

Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[tuple[t.Any, ...]]]


@venturi.task("trouble.step")
class Step:
    number: int = 0


class Gate:
    """A handler of steps that waits until it is told to end."""

    def __init__(self, queue: venturi.Queue) -> None:
        self.runs = 0
        self._running = threading.Semaphore(0)
        self._go = threading.Event()
        queue.handler(task=Step)(self.handle)

    def handle(self, task: Step) -> None:
        """Run one job."""
        self.runs += 1
        self._running.release()
        assert self._go.wait(10)

    def wait(self) -> None:
        """Wait until one has started."""
        assert self._running.acquire(timeout=5)

    def open(self) -> None:
        """Let all of them end, now and later."""
        self._go.set()


class Counter:
    """What the queue's telemetry counts."""

    def __init__(self, queue: venturi.Queue, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: dict[str, int] = {}
        monkeypatch.setattr(queue.telemetry, "count", self._count)

    def _count(self, name: str, amount: int = 1, **attributes: object) -> None:
        self.counts[name] = self.counts.get(name, 0) + amount

    def lost(self) -> int:
        """Lost claims."""
        return self.counts.get("venturi.lost_claims", 0)


def refusals(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """The records of refused results."""
    return [record for record in caplog.records if "is not recorded" in record.getMessage()]


def update(connection: psycopg.Connection[t.Any], schema: str, assignment: str, id: uuid.UUID) -> None:
    """Change a live row by hand."""
    statement: t.Any = f"UPDATE {{}}.live SET {assignment} WHERE id = %s"
    connection.execute(sql.SQL(statement).format(sql.Identifier(schema)), (id,))


@pytest.mark.conformance(119)
@pytest.mark.parametrize("change", ["run_count = run_count + 1", "owner = '00000000-0000-0000-0000-000000000001'"])
def test_a_result_whose_claim_is_lost_is_refused_and_counted_once(
    queue: venturi.Queue,
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    change: str,
) -> None:
    """It writes nothing, logs a warning with id and run, and counts one lost claim (cases 064, 172)."""
    gate, counter = Gate(queue), Counter(queue, monkeypatch)
    id_ = queue.enqueue(Step()).id
    with working(queue, concurrency=1, lease=60):
        gate.wait()
        update(session, queue.schema, change, id_)
        before = queue.job(id_)
        gate.open()
        (record,) = eventually(lambda: refusals(caplog))
        assert (queue.job(id_), queue.journal(id_)) == (before, [])
        assert counter.lost() == 1
    assert record.levelno == logging.WARNING
    assert (getattr(record, "job"), getattr(record, "run")) == (str(id_), 1)  # noqa: B009 - not declared
    assert str(id_) in record.getMessage()


@pytest.mark.parametrize(
    ("change", "recorded"),
    [
        ("DELETE FROM {schema}.live WHERE id = %s", False),
        ("DELETE FROM {schema}.jobs WHERE id = %s", True),
        ("UPDATE {schema}.live SET kind = 'another' WHERE id = %s", True),
        ("DELETE FROM {schema}.journal WHERE job_id = %s", True),
    ],
)
def test_a_row_that_somebody_deletes_or_edits_disturbs_no_other(
    queue: venturi.Queue, session: Session, change: t.LiteralString, recorded: bool
) -> None:
    """What still can be is recorded, the rest refused, and the runs that end with it are settled (case 074)."""
    gate = Gate(queue)
    changed, other = (receipt.id for receipt in queue.enqueue_many([Step(1), Step(2)]))
    with working(queue, lease=60):
        gate.wait()
        gate.wait()
        session.execute(on(queue.schema, change), [changed])
        gate.open()
        ended(queue, other)
        ended(queue, queue.enqueue(Step(3)).id)
        eventually(lambda: len(queue.journal(changed)) == recorded)
        assert (queue.jobs(status="claimed"), gate.runs) == ([], 3)


@pytest.mark.conformance(119)
def test_a_locked_row_is_asked_for_again_and_counts_nothing(
    queue: venturi.Queue, connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Locked is not lost: the result is settled when the lock is gone; other jobs do not wait."""
    gate, counter, holder = Gate(queue), Counter(queue, monkeypatch), connect()
    locked, free = (receipt.id for receipt in queue.enqueue_many([Step(1), Step(2)]))
    with working(queue):
        gate.wait()
        gate.wait()
        holder.execute(
            sql.SQL("SELECT FROM {}.live WHERE id = %s FOR UPDATE").format(sql.Identifier(queue.schema)), (locked,)
        )
        gate.open()
        ended(queue, free)
        later = queue.enqueue(Step(3)).id
        ended(queue, later)
        assert queue.journal(locked) == []
        holder.rollback()
        until(queue, locked, "completed")
    assert (counter.lost(), refusals(caplog), gate.runs) == (0, [], 3)


@pytest.mark.conformance(121)
def test_a_result_outlives_an_outage(queue: venturi.Queue, proxy: Proxy) -> None:
    """Given the database away when a handler ends, it is settled once it is back: one entry, no second run."""
    distant = venturi.Queue(queue.schema, dsn=proxy.dsn)
    gate = Gate(distant)
    id_ = queue.enqueue(Step()).id
    with working(distant, lease=60):
        gate.wait()
        proxy.refuse()
        proxy.cut()
        gate.open()
        time.sleep(0.7)
        assert queue.journal(id_) == []
        proxy.resume()
        until(queue, id_, "completed")
    distant.close()
    assert gate.runs == 1


@pytest.mark.conformance(122)
@pytest.mark.parametrize("recovered", [False, True])
def test_after_a_lease_that_ran_out_in_an_outage_the_epoch_decides(
    queue: venturi.Queue,
    session: Session,
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    recovered: bool,
) -> None:
    """Still ours = settled; recovered = lost, logged once; the slot is free again either way."""
    distant = venturi.Queue(queue.schema, dsn=proxy.dsn)
    gate, counter = Gate(distant), Counter(distant, monkeypatch)
    id_ = queue.enqueue(Step()).id
    with working(distant, concurrency=1, lease=1) as worker:
        gate.wait()
        proxy.refuse()
        proxy.cut()
        gate.open()
        update(session, queue.schema, "lease_until = statement_timestamp() - interval '1 s'", id_)
        if recovered:
            ending = Ending(str(id_), "trouble.step", 1, worker.id, "recovered", delay=3_600_000_000)
            assert claiming(queue.schema).settle(session, [ending], expired=True) == []
        proxy.resume()
        after = queue.enqueue(Step()).id
        ended(queue, after)
        until(queue, id_, "recovered" if recovered else "completed")
    distant.close()
    assert counter.lost() == len(refusals(caplog)) == int(recovered)
    assert gate.runs == 2


@pytest.mark.conformance(123)
def test_an_answer_that_was_lost_after_the_commit_is_no_second_entry(
    queue: venturi.Queue,
    proxy: Proxy,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Given the connection cut between commit and answer, one entry is left and no claim counts as lost (case 076)."""
    distant = venturi.Queue(queue.schema, dsn=proxy.dsn)
    gate, counter = Gate(distant), Counter(distant, monkeypatch)
    id_ = queue.enqueue(Step()).id
    with held_up(connect(autocommit=True), queue.schema) as holdup, working(distant, concurrency=1) as worker:
        gate.wait()
        gate.open()
        holdup.wait()
        # The statement waits in the server with all that belongs to it; nobody is left to hear of its end.
        proxy.cut()
        holdup.let_go()
        until(queue, id_, "completed")
        ended(queue, queue.enqueue(Step()).id)
        worker.stop()
        report = worker.join(5)
    distant.close()
    assert report is not None
    assert (report.settled, report.unsettled) == (2, ())
    assert (counter.lost(), refusals(caplog), gate.runs) == (0, [], 2)
    assert len(queue.journal(id_)) == 1


@pytest.mark.conformance(123)
def test_a_session_that_is_terminated_before_the_commit_settles_once(queue: venturi.Queue, connect: Connect) -> None:
    """The other half of an ambiguous commit: nothing was recorded, and the retry records it (case 076)."""
    gate, watch = Gate(queue), connect(autocommit=True)
    id_ = queue.enqueue(Step()).id
    with held_up(connect(autocommit=True), queue.schema) as holdup, working(queue, concurrency=1):
        gate.wait()
        gate.open()
        holdup.wait()
        watch.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'venturi coordinator'"
        )
        holdup.let_go()
        until(queue, id_, "completed")
    assert gate.runs == 1


@pytest.mark.conformance(124)
def test_one_result_that_the_database_refuses_does_not_hold_up_the_others(
    queue: venturi.Queue, session: Session
) -> None:
    """It is settled with a reduced entry that says so; the other 49 settle in the same turn."""
    session.execute(
        sql.SQL("ALTER TABLE {}.journal ADD CHECK (note IS DISTINCT FROM 'poison')").format(
            sql.Identifier(queue.schema)
        )
    )
    together = threading.Barrier(50)

    @queue.handler
    def handle(task: Step, ctx: venturi.Context) -> venturi.Outcome:
        ctx.attach(number=task.number)
        together.wait(10)
        return venturi.Completed("poison" if task.number == 17 else "fine")

    ids = [receipt.id for receipt in queue.enqueue_many([Step(number) for number in range(50)])]
    with working(queue, concurrency=50) as worker:
        entries = [until(queue, id_, "completed")[0] for id_ in ids]
        worker.stop()
        report = worker.join(5)
    assert report is not None
    assert report.settled == 50
    bad = entries.pop(17)
    assert bad.note is not None
    assert "refused" in bad.note
    assert (bad.evidence, bad.worker, bad.run_no) == (None, worker.id, 1)
    assert {entry.note for entry in entries} == {"fine"}
    assert [entry.evidence["number"] for entry in entries] == [n for n in range(50) if n != 17]
    times = [entry.recorded_at for entry in entries]
    assert (max(times) - min(times)).total_seconds() < 2


@pytest.mark.conformance(128)
def test_a_busy_worker_settles_and_claims_in_groups(queue: venturi.Queue, session: Session) -> None:
    """At concurrency 50 with empty handlers and 5 000 jobs, fewer than 0.2 commits per job."""
    schema = sql.Identifier(queue.schema)
    session.execute(sql.SQL("CREATE TABLE {}.turns (transaction xid8)").format(schema))
    # A statement's trigger fires for claims and settles that change nothing, too.
    session.execute(
        sql.SQL(
            """CREATE FUNCTION {0}.note() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN INSERT INTO {0}.turns VALUES (pg_current_xact_id()); RETURN NULL; END $$;
            CREATE TRIGGER note AFTER UPDATE ON {0}.live FOR EACH STATEMENT EXECUTE FUNCTION {0}.note()"""
        ).format(schema)
    )
    queue.handler(task=Step)(lambda task: None)
    fill(session, queue.schema, 5000, "trouble.step")
    done = sql.SQL("SELECT count(*) FROM {}.journal").format(schema)
    with working(queue, concurrency=50, lease=60):
        eventually(lambda: session.execute(done).fetchone() == (5000,), 20)
        row = session.execute(sql.SQL("SELECT count(DISTINCT transaction) FROM {}.turns").format(schema)).fetchone()
    assert row is not None
    assert row[0] < 1000


@pytest.mark.conformance(261)
def test_a_settle_that_races_renewals_leaves_no_row_behind(schema: str, session: Session, dsn: str) -> None:
    """A renewal that commits while a settle is under way makes it ask again: no entry beside a claim that stays."""
    worker = claiming(schema)
    fill(session, schema, 300, "trouble.step")
    claims = claim(worker, session, "trouble.step", count=300)
    stop = threading.Event()
    with connections.connect(dsn, name="venturi test renewals") as renewing:

        def renew() -> None:
            while not stop.is_set():
                worker.renew(renewing, [(each.key, each.run_count) for each in claims])

        thread = threading.Thread(target=renew)
        thread.start()
        try:
            left = completed(claims, worker.owner)
            deadline = time.monotonic() + 10
            while left and time.monotonic() < deadline:
                answers = worker.settle(session, left)
                assert all(answer.ours for answer in answers)
                locked = {answer.key for answer in answers}
                left = [ending for ending in left if ending.key in locked]
        finally:
            stop.set()
            thread.join()
    rows = session.execute(
        sql.SQL("SELECT (SELECT count(*) FROM {0}.live), (SELECT count(*) FROM {0}.journal)").format(
            sql.Identifier(schema)
        )
    ).fetchone()
    assert rows == (0, 300)


def test_a_stop_gives_back_what_a_claim_took_whose_answer_was_lost(
    queue: venturi.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is pending again and has not failed, though the worker never learned that it had claimed it."""
    turn = Claiming.turn
    workers: list[venturi.Worker] = []

    def lost(self: Claiming, session: Session, endings: cabc.Sequence[Ending], ask: Ask | None) -> Turn:
        answer = turn(self, session, endings, ask)
        if answer.claims:
            workers[0].stop()
            raise psycopg.OperationalError("the answer is lost")
        return answer

    monkeypatch.setattr(Claiming, "turn", lost)
    Gate(queue)
    with working(queue) as worker:
        workers.append(worker)
        job = queue.enqueue(Step()).id
        assert worker.join(5) == venturi.Report(0)
    (entry,) = queue.journal(job)
    assert (entry.outcome, entry.failure_count) == ("released", 0)
