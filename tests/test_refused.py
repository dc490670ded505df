"""Rows that the database refuses whatever is said of them: nothing else waits for them."""

from __future__ import annotations

import collections.abc as cabc
import logging
import threading
import uuid

import psycopg
import pytest
from fixtures.claims import fill, strand
from fixtures.sqltext import on
from fixtures.stubborn import stopped
from fixtures.waiting import eventually
from fixtures.work import ended, until, working

import venturi
from venturi.store.claiming import Ask, Claiming, Ending, Turn
from venturi.store.connections import Session

_REFUSING = """
CREATE FUNCTION {schema}.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  IF NEW.kind = 'refused.bad' THEN RAISE EXCEPTION 'no'; END IF; RETURN NEW; END $$;
CREATE TRIGGER refuse BEFORE INSERT ON {schema}.journal FOR EACH ROW EXECUTE FUNCTION {schema}.refuse();
"""


@venturi.task("refused.bad")
class Bad:
    pass


@venturi.task("refused.good")
class Good:
    pass


@pytest.fixture
def refusing(queue: venturi.Queue, session: Session) -> venturi.Queue:
    """A queue in whose journal nothing can be written of bad jobs."""
    session.execute(on(queue.schema, _REFUSING))
    return queue


def about(caplog: pytest.LogCaptureFixture, job: uuid.UUID) -> list[logging.LogRecord]:
    """What was logged of a job, from warnings on."""
    return [each for each in caplog.records if getattr(each, "job", "") == str(job) and each.levelno >= logging.WARNING]


@pytest.mark.conformance(124)
def test_a_result_that_is_refused_in_every_form_holds_up_no_other(
    refusing: venturi.Queue, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that end with it are settled, later ones are claimed, and its slot is free again (case 074)."""
    both = threading.Barrier(2)

    def handle(task: object) -> None:
        both.wait(10)

    for task in (Bad, Good):
        refusing.handler(task=task)(handle)
    with working(refusing) as worker:
        bad, good = refusing.enqueue(Bad()).id, refusing.enqueue(Good()).id
        ended(refusing, good)
        for each in refusing.enqueue_many([Good(), Good()]):
            ended(refusing, each.id)
        worker.stop()
        assert stopped(worker) == venturi.Report(3)
    (record,) = about(caplog, bad)
    assert "refused.bad: the result of run 1 is not recorded, the database refuses it (SQLSTATE P0001)" in (
        record.getMessage()
    )


@pytest.mark.conformance(166)
def test_claims_that_cannot_be_recovered_keep_no_others_from_it(
    refusing: venturi.Queue, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    """More of them than one batch holds, all with an older lease; each is named in the log (case 073)."""
    queue = refusing
    queue.handler(task=Good)(lambda task: None)
    fill(session, queue.schema, 101, "refused.bad")
    strand(session, queue.schema, *(job.id for job in queue.jobs(limit=1000)), over="1 h")
    good = queue.enqueue(Good()).id
    strand(session, queue.schema, good)
    with working(queue):
        until(queue, good, "recovered")
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len({getattr(record, "job", None) for record in errors}) == len(errors) == 101
    assert all("refused.bad" in record.getMessage() and "P0001" in record.getMessage() for record in errors)
    assert {job.status for job in queue.jobs(kind="refused.bad", limit=1000)} == {"claimed"}


@pytest.mark.conformance(184, 189)
def test_a_straggler_that_cannot_be_given_back_keeps_no_other_from_it(refusing: venturi.Queue) -> None:
    """The others are released at the deadline as ever, and the report names it as unsettled (case 140)."""
    began, go = threading.Semaphore(0), threading.Event()

    def handle(task: object) -> None:
        began.release()
        go.wait(10)

    for task in (Bad, Good):
        refusing.handler(task=task)(handle)
    bad, good = refusing.enqueue(Bad()).id, refusing.enqueue(Good()).id
    with working(refusing, shutdown_timeout=0) as worker:
        for _ in range(2):
            assert began.acquire(timeout=5)
        worker.stop()
        report = stopped(worker)
    go.set()
    assert ([each.id for each in report.released], report.unsettled) == ([good], (bad,))
    assert [entry.outcome for entry in refusing.journal(good)] == ["released"]


class LostClaim:
    """Loses the answer to the first claim that has taken jobs.

    Attributes:
        then: Called before that.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, then: cabc.Callable[[], object]) -> None:
        self._then: cabc.Callable[[], object] | None = then
        turn = Claiming.turn

        def lost(this: Claiming, session: Session, endings: cabc.Sequence[Ending], ask: Ask | None) -> Turn:
            answer = turn(this, session, endings, ask)
            if answer.claims and self._then is not None:
                then, self._then = self._then, None
                then()
                raise psycopg.OperationalError("the answer is lost")
            return answer

        monkeypatch.setattr(Claiming, "turn", lost)


def test_a_stray_that_cannot_be_given_back_keeps_no_other_from_it(
    refusing: venturi.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other job of the claim whose answer was lost runs, and the worker goes on (case 076)."""
    for task in (Bad, Good):
        refusing.handler(task=task)(lambda task: None)
    bad, good = (receipt.id for receipt in refusing.enqueue_many([Bad(), Good()]))
    LostClaim(monkeypatch, lambda: None)
    with working(refusing):
        until(refusing, good, "released", "completed")
    job = refusing.job(bad)
    assert job is not None
    assert (job.status, job.run_count) == ("claimed", 1)


@pytest.mark.conformance(191)
def test_a_stop_tries_again_to_give_back_what_a_lost_claim_took(
    queue: venturi.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the connection is lost once more meanwhile (case 076)."""
    queue.handler(task=Good)(lambda task: None)
    strays, failures = Claiming.strays, [psycopg.OperationalError("cut again")]

    def failing(this: Claiming, *arguments: object) -> list[Ending]:
        if failures:
            raise failures.pop()
        return strays(this, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Claiming, "strays", failing)
    with working(queue) as worker:
        LostClaim(monkeypatch, worker.stop)
        job = queue.enqueue(Good()).id
        assert stopped(worker) == venturi.Report(0)
    (entry,) = queue.journal(job)
    assert (entry.outcome, entry.failure_count) == ("released", 0)


@pytest.mark.parametrize("stops", [True, False])
def test_what_a_lost_claim_took_is_given_back_though_its_row_is_locked_just_then(
    queue: venturi.Queue, session: Session, monkeypatch: pytest.MonkeyPatch, dsn: str, stops: bool
) -> None:
    """As soon as the lock is gone, by a worker that stops and by one that would sleep for long (case 076)."""
    queue.handler(task=Good)(lambda task: None)
    strays, looks = Claiming.strays, threading.Semaphore(0)

    def counted(this: Claiming, *arguments: object) -> list[Ending]:
        looks.release()
        return strays(this, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Claiming, "strays", counted)
    with psycopg.connect(dsn) as holder, working(queue, poll=60) as worker:

        def lock() -> None:
            holder.execute(on(queue.schema, "SELECT FROM {schema}.live FOR UPDATE"))
            if stops:
                worker.stop()

        LostClaim(monkeypatch, lock)
        job = queue.enqueue(Good()).id
        for _ in range(2):
            assert looks.acquire(timeout=5)
        assert queue.journal(job) == []
        holder.rollback()
        eventually(lambda: queue.journal(job))
        assert queue.journal(job)[0].outcome == "released"
        if not stops:
            ended(queue, job)
