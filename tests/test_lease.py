"""Leases are renewed while handlers live, lost claims are noticed, and timeouts end them."""

from __future__ import annotations

import collections.abc as cabc
import datetime as dt
import itertools
import logging
import threading
import time
import typing as t
import uuid

import psycopg
import pytest
from fixtures.claims import alter, claim, claiming, expire, fill
from fixtures.proxy import Proxy
from fixtures.waiting import eventually
from fixtures.work import ended, until, working
from psycopg import sql

import venturi
from venturi.store import connections
from venturi.store.claiming import Ask, Claiming, Ending, Turn
from venturi.store.connections import Session
from venturi.worker import maintainer

Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[tuple[t.Any, ...]]]


@venturi.task("lease.step")
class Step:
    number: int = 0


@venturi.task("lease.brief", timeout=0.2)
class Brief:
    pass


@venturi.task("lease.delta", timeout=dt.timedelta(seconds=0.2))
class Delta:
    pass


class Gate:
    """A handler that waits until it is told to end, or until its test gives up.

    Attributes:
        told: Reason and monotonic instant at which each run was told to stop.
    """

    def __init__(self, queue: venturi.Queue, task: type = Step, *, listens: bool = False) -> None:
        self.runs = 0
        self.began = 0.0
        self.told: list[tuple[str | None, float]] = []
        self._listens = listens
        self._running = threading.Semaphore(0)
        self._go = threading.Event()
        queue.handler(task=task)(self.handle)

    def handle(self, task: object, ctx: venturi.Context) -> venturi.Outcome:
        """Run one job."""
        self.runs += 1
        self.began = time.monotonic()
        self._running.release()
        if self._listens:
            assert ctx.cancelled.wait(10)
            self.told.append((ctx.cancelled.reason, time.monotonic()))
        assert self._go.wait(10)
        return venturi.Completed("late")

    def wait(self) -> None:
        """Wait until one has started."""
        assert self._running.acquire(timeout=5)

    def reason(self) -> tuple[str | None, float]:
        """Wait until the run was told to stop."""
        return eventually(lambda: self.told)[0]

    def open(self) -> None:
        """Let all of them end, now and later."""
        self._go.set()


_AUDIT = """
CREATE TABLE {0}.renewals (at timestamptz, who text, transaction xid8, claims bigint);
CREATE FUNCTION {0}.note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  INSERT INTO {0}.renewals SELECT clock_timestamp(), current_setting('application_name'), pg_current_xact_id(), count(*)
    FROM new_rows n JOIN old_rows o USING (id, owner, run_count) WHERE n.lease_until > o.lease_until;
  RETURN NULL; END $$;
CREATE TRIGGER note AFTER UPDATE ON {0}.live REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows
  FOR EACH STATEMENT EXECUTE FUNCTION {0}.note();
"""


@pytest.mark.conformance(157, 158)
def test_claims_are_renewed_for_as_long_as_their_handlers_live(queue: venturi.Queue, session: Session) -> None:
    """All claims by one statement of the maintainer each third of a lease, also while the worker drains.

    Cases 062, 067.
    """
    schema = sql.Identifier(queue.schema)
    session.execute(sql.SQL(_AUDIT).format(schema))
    gate = Gate(queue)
    ids = [receipt.id for receipt in queue.enqueue_many([Step(n) for n in range(3)])]

    def renewals() -> list[tuple[dt.datetime, str, int]]:
        query = sql.SQL("SELECT at, who, claims FROM {}.renewals WHERE claims > 0 ORDER BY at").format(schema)
        return session.execute(query).fetchall()

    with working(queue, concurrency=3, lease=1, shutdown_timeout=10) as worker:
        for _ in ids:
            gate.wait()
        eventually(lambda: len(renewals()) >= 5)
        worker.stop()
        stopped = len(renewals())
        # More than a lease after the stop, and more than three after the claim.
        eventually(lambda: len(renewals()) >= stopped + 5)
        gate.open()
    entries = [queue.journal(id_) for id_ in ids]
    assert [[(entry.outcome, entry.run_no) for entry in each] for each in entries] == [[("completed", 1)]] * 3
    assert all(entry.duration and entry.duration > dt.timedelta(seconds=3) for (entry,) in entries)
    assert gate.runs == 3
    times = [at for at, _, _ in renewals()]
    gaps = [(later - earlier).total_seconds() for earlier, later in itertools.pairwise(times[1:])]
    assert {who for _, who, _ in renewals()} == {"venturi maintainer"}
    assert {claims for _, _, claims in renewals()[1:]} == {3}
    assert 0.3 < sorted(gaps)[len(gaps) // 2] < 0.45


@pytest.mark.conformance(159)
def test_a_renewal_of_another_epoch_changes_nothing(queue: venturi.Queue, session: Session) -> None:
    """By an older run_count or another owner: the lease stays, and the answer says that the claim is not ours."""
    id_ = queue.enqueue(Step()).id
    worker, stranger = claiming(queue.schema, lease=100), claiming(queue.schema, lease=999)
    (taken,) = claim(worker, session, "lease.step")
    before = queue.job(id_)
    assert worker.renew(session, [(taken.key, taken.run_count - 1)]) == [(taken.key, False, False)]
    assert stranger.renew(session, [(taken.key, taken.run_count)]) == [(taken.key, False, False)]
    assert queue.job(id_) == before
    assert worker.renew(session, [(taken.key, taken.run_count)]) == [(taken.key, True, True)]


@pytest.mark.conformance(261)
def test_a_renewal_passes_over_a_locked_row(queue: venturi.Queue, session: Session, connect: Connect) -> None:
    """It waits for nobody, renews the others, and says that the locked one is still ours."""
    locked, free = (receipt.id for receipt in queue.enqueue_many([Step(1), Step(2)]))
    worker = claiming(queue.schema)
    claim(worker, session, "lease.step")
    connect().execute(
        sql.SQL("SELECT FROM {}.live WHERE id = %s FOR UPDATE").format(sql.Identifier(queue.schema)), (locked,)
    )
    session.execute("SET lock_timeout = '1s'")
    answers = worker.renew(session, [(str(locked), 1), (str(free), 1)])
    assert sorted(answers) == sorted([(str(locked), False, True), (str(free), True, True)])


@pytest.mark.conformance(159)
@pytest.mark.parametrize(
    ("column", "value"), [("run_count", 7), ("owner", uuid.UUID(int=1))], ids=["run_count", "owner"]
)
def test_a_run_whose_claim_was_taken_is_told_by_the_next_renewal(
    queue: venturi.Queue, session: Session, column: str, value: object
) -> None:
    """ctx.cancelled is set with reason lease lost within a third of the lease, long before it would be over."""
    gate = Gate(queue, listens=True)
    id_ = queue.enqueue(Step()).id
    with working(queue, lease=2):
        gate.wait()
        alter(session, queue.schema, id_, column, value)
        changed = time.monotonic()
        reason, at = gate.reason()
        gate.open()
    assert reason == "lease lost"
    assert at - changed < 2 / 3 + 0.2
    assert queue.journal(id_) == []


@pytest.mark.conformance(160)
def test_without_the_database_the_lease_is_lost_by_the_clock(queue: venturi.Queue, proxy: Proxy) -> None:
    """Counted from before the last good renewal was sent: never later than the database thinks."""
    distant = venturi.Queue(queue.schema, dsn=proxy.dsn)
    gate = Gate(distant, listens=True)
    id_ = queue.enqueue(Step()).id
    with working(distant, lease=1):
        gate.wait()
        proxy.hold()
        held = time.monotonic()
        job = queue.job(id_)
        assert job is not None
        assert job.lease_until is not None
        reason, at = gate.reason()
        over = dt.datetime.now(dt.UTC)
        gate.open()
        proxy.resume()
        ended(queue, id_)
    distant.close()
    assert reason == "lease lost"
    assert 0.5 < at - held <= 1.2
    assert over <= job.lease_until + dt.timedelta(seconds=0.2)


@pytest.mark.conformance(161)
@pytest.mark.parametrize("task", [Brief, Delta])
def test_a_run_past_its_timeout_is_told_and_settled_by_what_it_returns(queue: venturi.Queue, task: type) -> None:
    """ctx.cancelled is set with reason timeout at that time; a handler that then ends is settled as it ended."""
    gate = Gate(queue, task, listens=True)
    asked = time.monotonic()
    id_ = queue.enqueue(task()).id
    with working(queue, lease=60):
        reason, at = gate.reason()
        gate.open()
        (entry,) = until(queue, id_, "completed")
    assert reason == "timeout"
    assert at - asked >= 0.2
    assert at - gate.began < 0.35
    assert entry.note == "late"


def test_a_run_that_does_not_end_is_reported_at_ever_longer_intervals(
    queue: venturi.Queue, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler that hangs without a timeout is named with its thread, and not at every renewal (case 025)."""
    monkeypatch.setattr(maintainer, "LONG_RUN", 0.3)
    gate = Gate(queue)
    id_ = queue.enqueue(Step()).id

    def reports() -> list[logging.LogRecord]:
        return [record for record in caplog.records if "has not ended" in record.getMessage()]

    with working(queue, lease=1):
        eventually(lambda: len(reports()) == 3)
        assert time.monotonic() - gate.began >= 0.3 * 4
        gate.open()
        ended(queue, id_)
    text = reports()[0].getMessage()
    assert str(id_) in text
    assert "venturi-" in text
    assert reports()[0].levelno == logging.WARNING


@pytest.mark.conformance(161)
def test_a_run_past_its_timeout_that_raises_is_a_failure(queue: venturi.Queue) -> None:
    """What it raised decides: here the Cancelled of its own check."""

    @queue.handler
    def handle(task: Brief, ctx: venturi.Context) -> None:
        ctx.cancelled.wait(10)
        ctx.cancelled.check()

    id_ = queue.enqueue(Brief()).id
    with working(queue, lease=60):
        (entry,) = until(queue, id_, "retried")
    assert entry.note is not None
    assert "timeout" in entry.note


@pytest.mark.conformance(162)
def test_a_handler_that_ignores_its_timeout_loses_its_job_but_not_its_slot(
    queue: venturi.Queue, caplog: pytest.LogCaptureFixture
) -> None:
    """It is recovered as a failure within 4/3 of a lease; the slot stays busy; the late result is refused.

    Case 025.
    """
    gate = Gate(queue, Brief)
    queue.handler(task=Step)(lambda task: None)
    id_ = queue.enqueue(Brief()).id
    with working(queue, concurrency=1, lease=1):
        gate.wait()
        told = gate.began + 0.2
        other = queue.enqueue(Step()).id
        (entry,) = until(queue, id_, "recovered")
        assert time.monotonic() - told < 4 / 3 + 0.2
        job = queue.job(other)
        assert job is not None
        assert job.status == "pending"
        gate.open()
        ended(queue, other)
    assert entry.failure_count == 1
    assert [entry.outcome for entry in queue.journal(id_)] == ["recovered"]
    assert sum("is not recorded" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.conformance(162)
def test_a_run_past_its_timeout_loses_its_job_whatever_it_was_told_before(queue: venturi.Queue) -> None:
    """A stuck job that somebody has cancelled is recovered, as cancelled, like any other (case 025)."""
    gate = Gate(queue, Brief)
    id_ = queue.enqueue(Brief()).id
    with working(queue, concurrency=1, lease=1) as worker:
        gate.wait()
        assert queue.cancel(id_)
        (entry,) = until(queue, id_, "cancelled")
        gate.open()
    assert entry.worker == worker.id
    assert entry.note is not None
    assert "lease" in entry.note


def test_a_renewal_that_comes_after_a_settle_warns_of_nothing(
    queue: venturi.Queue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The end of a run is recorded while the coordinator has not read so: its claim is gone, and not lost."""
    turn, renew, renewed = Claiming.turn, Claiming.renew, threading.Event()

    def late(this: Claiming, session: Session, endings: cabc.Sequence[Ending], ask: Ask | None) -> Turn:
        answer = turn(this, session, endings, ask)
        assert not endings or renewed.wait(5)
        return answer

    def noted(this: Claiming, session: Session, claims: cabc.Sequence[tuple[str, int]]) -> list[tuple[str, bool, bool]]:
        answers = renew(this, session, claims)
        if answers == [(str(id_), False, False)]:
            renewed.set()
        return answers

    monkeypatch.setattr(Claiming, "turn", late)
    monkeypatch.setattr(Claiming, "renew", noted)
    queue.handler(task=Step)(lambda task: None)
    id_ = queue.enqueue(Step()).id
    with working(queue, lease=1):
        eventually(lambda: renewed.is_set() and queue.stats().kinds == {})
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.conformance(261)
@pytest.mark.slow
def test_renewals_every_ten_milliseconds_disturb_no_settle(
    queue: venturi.Queue, session: Session, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """100 slots, renewals every 10 ms: every job is settled once, none is lost, none stays behind, and no deadlock."""
    jobs = 8000
    queue.handler(task=Step)(lambda task: None)
    fill(session, queue.schema, jobs, "lease.step")
    counts = sql.SQL("SELECT (SELECT count(*) FROM {0}.live), (SELECT count(*) FROM {0}.journal)").format(
        sql.Identifier(queue.schema)
    )
    stop = threading.Event()
    errors: list[BaseException] = []
    renewed: list[int] = []

    def renew(statements: t.Any, renewing: Session) -> None:
        claims = sql.SQL("SELECT id, run_count FROM {}.live WHERE owner IS NOT NULL").format(
            sql.Identifier(queue.schema)
        )
        try:
            while not stop.wait(0.01):
                answers = statements.renew(renewing, renewing.execute(claims).fetchall())
                renewed.append(sum(was for _, was, _ in answers))
        except psycopg.Error as error:
            errors.append(error)

    with connections.connect(dsn, name="venturi test renewals") as renewing, working(queue, concurrency=100) as worker:
        thread = threading.Thread(target=renew, args=(claiming(queue.schema, id=worker.id), renewing))
        thread.start()
        try:
            eventually(lambda: session.execute(counts).fetchone() == (0, jobs), 20)
        finally:
            stop.set()
            thread.join()
    assert errors == []
    assert sum(renewed) > 0
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []


def test_an_expired_claim_can_still_be_renewed_by_its_owner(queue: venturi.Queue, session: Session) -> None:
    """As long as nobody has recovered it."""
    id_ = queue.enqueue(Step()).id
    worker = claiming(queue.schema)
    claim(worker, session, "lease.step")
    expire(session, queue.schema, id_)
    assert worker.renew(session, [(str(id_), 1)]) == [(str(id_), True, True)]
    assert worker.expired(session) == []
