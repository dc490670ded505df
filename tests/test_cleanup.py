"""Deleting finished jobs."""

from __future__ import annotations

import collections.abc as cabc
import datetime as dt
import typing as t
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psycopg
import pytest
from fixtures.serverlog import ServerLog
from fixtures.sqltext import on
from fixtures.work import ended, working

import venturi
from venturi.store import looking

Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[t.Any]]

LATER = dt.datetime(9000, 1, 1, tzinfo=dt.UTC)


@pytest.fixture
def schema(emptied: str) -> str:
    """All tests here are content with one schema, emptied in between."""
    return emptied


@venturi.task("alpha")
class Alpha:
    fail: bool = False


@venturi.task("beta")
class Beta:
    pass


@pytest.fixture
def finished(queue: venturi.Queue) -> list[uuid.UUID]:
    """A completed alpha, a dead alpha, a cancelled beta and a completed beta, in the order of their ends."""

    @queue.handler
    def alpha(task: Alpha) -> None:
        if task.fail:
            raise venturi.PermanentError("never")

    @queue.handler
    def beta(task: Beta) -> None:
        pass

    jobs = list[uuid.UUID]()
    with working(queue, poll=0.02):
        for task, status in (
            (Alpha(), "completed"),
            (Alpha(True), "dead"),
            (Beta(), "cancelled"),
            (Beta(), "completed"),
        ):
            jobs.append(queue.enqueue(task, delay=dt.timedelta(hours=status == "cancelled")).id)
            if status == "cancelled":
                assert queue.cancel(jobs[-1])
            ended(queue, jobs[-1], status)
    return jobs


def left(queue: venturi.Queue) -> set[uuid.UUID]:
    return {job.id for job in queue.jobs()}


@pytest.mark.conformance(216)
def test_cleanup_deletes_what_finished_before_the_instant_with_all_its_entries(
    queue: venturi.Queue, finished: list[uuid.UUID], connect: Connect
) -> None:
    """Strictly before: a job that ended at the very instant stays, and so do the entries of all others."""
    third = queue.job(finished[2])
    assert third is not None
    assert third.finished_at is not None
    before = {id_: queue.journal(id_) for id_ in finished[2:]}
    assert queue.cleanup(finished_before=third.finished_at) == 2
    assert left(queue) == set(finished[2:])
    assert {id_: queue.journal(id_) for id_ in finished[2:]} == before
    assert [queue.journal(id_) for id_ in finished[:2]] == [[], []]
    with connect(autocommit=True) as connection:
        for table in ("dead", "live", "cancels"):
            assert connection.execute(
                on(queue.schema, "SELECT count(*) FROM {schema}.{table}", table=table)
            ).fetchone() == (0,)
    assert queue.requeue(finished[1]) is False
    assert queue.cleanup(finished_before=LATER) == 2
    assert queue.cleanup(finished_before=LATER) == 0


@pytest.mark.conformance(217)
@pytest.mark.parametrize(
    ("options", "gone"),
    [
        ({"kind": "alpha"}, {0, 1}),
        ({"status": "completed"}, {0, 3}),
        ({"status": "dead"}, {1}),
        ({"status": "cancelled"}, {2}),
        ({"kind": "beta", "status": "completed"}, {3}),
        ({"kind": "gamma"}, set[int]()),
        ({}, {0, 1, 2, 3}),
    ],
)
def test_kind_and_status_narrow_a_cleanup(
    queue: venturi.Queue, finished: list[uuid.UUID], options: dict[str, t.Any], gone: set[int]
) -> None:
    """What does not fit both stays."""
    assert queue.cleanup(finished_before=LATER, **options) == len(gone)
    assert left(queue) == {id_ for number, id_ in enumerate(finished) if number not in gone}


@pytest.mark.conformance(217)
def test_unfinished_jobs_are_never_deleted(queue: venturi.Queue, finished: list[uuid.UUID], connect: Connect) -> None:
    """Not a pending one, not a claimed one, and not one that was dead once and has been sent back."""
    pending, claimed = queue.enqueue(Alpha()).id, queue.enqueue(Alpha()).id
    assert queue.requeue(finished[1])
    with connect(autocommit=True) as connection:
        connection.execute(
            on(
                queue.schema,
                """UPDATE {schema}.live SET owner = %s, lease_until = now(), run_count = 1 WHERE id = %s""",
            ),
            [uuid.uuid4(), claimed],
        )
    assert queue.cleanup(finished_before=LATER) == 3
    assert left(queue) == {pending, claimed, finished[1]}
    assert [entry.outcome for entry in queue.journal(finished[1])] == ["dead", "requeued"]


@pytest.mark.conformance(217)
def test_jobs_that_are_held_keep_no_others_from_going(
    queue: venturi.Queue, finished: list[uuid.UUID], connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cleanup goes on behind them, though they are more than it deletes at a time (case 160)."""
    monkeypatch.setattr(looking, "CLEANUP_BATCH", 1)
    with connect() as operator:
        held = [finished[0], finished[1]]
        operator.execute(on(queue.schema, "SELECT FROM {schema}.jobs WHERE id = ANY (%s) FOR UPDATE"), [held])
        assert queue.cleanup(finished_before=LATER) == 2
    assert left(queue) == set(held)


@pytest.mark.conformance(217, 218)
def test_a_job_that_an_open_transaction_requeues_is_not_deleted(
    queue: venturi.Queue, finished: list[uuid.UUID], connect: Connect
) -> None:
    """A cleanup passes over it without waiting, and when the transaction has committed, the job is there as a whole."""
    with connect() as operator:
        assert queue.requeue(finished[1], conn=operator)
        with ThreadPoolExecutor(1) as pool:
            cleanup = pool.submit(queue.cleanup, finished_before=LATER)
            with suppress(TimeoutError):
                cleanup.result(5)
            operator.commit()
    assert cleanup.result(5) == 3
    job = queue.job(finished[1])
    assert job is not None
    assert (job.status, job.payload) == ("pending", {"fail": True})


@pytest.mark.conformance(217)
@pytest.mark.parametrize("status", ["pending", "claimed", "gone"])
def test_a_status_of_unfinished_jobs_is_refused(queue: venturi.Queue, status: str) -> None:
    """So is a naive instant (case 089)."""
    with pytest.raises(venturi.ConfigError, match="status"):
        queue.cleanup(finished_before=LATER, status=t.cast(t.Any, status))
    with pytest.raises(venturi.ConfigError, match="finished_before"):
        queue.cleanup(finished_before=dt.datetime(2030, 1, 1))


def fill(connection: psycopg.Connection[t.Any], schema: str, count: int) -> None:
    """Jobs that have completed, written by hand."""
    connection.execute(
        on(
            schema,
            """WITH made AS (
              INSERT INTO {schema}.jobs (id, kind, payload, priority, created_at)
              SELECT gen_random_uuid(), 'alpha', '{{}}', 1, now() FROM generate_series(1, %s) RETURNING id)
            INSERT INTO {schema}.journal (job_id, run_no, failure_count, recorded_at, outcome, kind)
            SELECT id, 1, 0, now() - interval '1 day', o, 'alpha' FROM made CROSS JOIN unnest(ARRAY[1, 0]) o""",
        ),
        [count],
    )


@pytest.mark.conformance(218)
def test_ten_thousand_jobs_go_in_transactions_of_a_thousand(
    schema: str, connect: Connect, server_log: ServerLog
) -> None:
    """Ten statements delete them and an eleventh finds nothing more; each commits by itself (case 160)."""
    queue = venturi.Queue(schema, dsn=server_log.dsn)
    with connect(autocommit=True) as connection:
        fill(connection, schema, 10_000)
        assert queue.cleanup(finished_before=dt.datetime.now(dt.UTC)) == 10_000
        assert connection.execute(on(schema, "SELECT count(*) FROM {schema}.journal")).fetchone() == (0,)
    queue.close()
    assert len(server_log.statements("WITH ended")) == 11
    assert server_log.statements("BEGIN") == []


@pytest.mark.conformance(218)
def test_two_cleanups_at_once_neither_block_nor_deadlock(schema: str, dsn: str, connect: Connect) -> None:
    """One passes over what an open transaction of another is deleting, and both together delete everything once.

    Case 160.
    """
    with connect(autocommit=True) as connection:
        fill(connection, schema, 3000)
        with connect() as other:
            rows = other.execute(on(schema, "SELECT id FROM {schema}.jobs ORDER BY id LIMIT 500 FOR UPDATE")).fetchall()
            queue = venturi.Queue(schema, dsn=dsn)
            assert queue.cleanup(finished_before=LATER) == 2500
            assert len(rows) == 500
        fill(connection, schema, 3000)
        with ThreadPoolExecutor(2) as pool:
            deleted = [pool.submit(queue.cleanup, finished_before=LATER) for _ in range(2)]
        queue.close()
    assert sum(each.result() for each in deleted) == 3500


def test_a_cleanup_that_is_interrupted_has_deleted_what_it_said(schema: str, dsn: str, connect: Connect) -> None:
    """What the batches before the error deleted stays deleted, and the next cleanup goes on from there (case 160)."""
    queue = venturi.Queue(schema, dsn=dsn)
    with connect(autocommit=True) as connection:
        fill(connection, schema, 2000)
        connection.execute(on(schema, "UPDATE {schema}.journal SET recorded_at = recorded_at - interval '1 hour'"))
        fill(connection, schema, 500)
        connection.execute(
            on(
                schema,
                """CREATE FUNCTION {schema}.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                     IF (SELECT count(*) FROM {schema}.jobs) <= 500 THEN RAISE EXCEPTION 'enough'; END IF;
                     RETURN OLD; END $$;
                   CREATE TRIGGER refuse BEFORE DELETE ON {schema}.jobs FOR EACH STATEMENT
                   EXECUTE FUNCTION {schema}.refuse()""",
            )
        )
        try:
            with pytest.raises(psycopg.errors.RaiseException):
                queue.cleanup(finished_before=LATER)
        finally:
            connection.execute(on(schema, "DROP FUNCTION {schema}.refuse() CASCADE"))
        left_over = connection.execute(
            on(schema, "SELECT (SELECT count(*) FROM {schema}.jobs), (SELECT count(*) FROM {schema}.journal)")
        ).fetchone()
        assert left_over == (500, 1000)
    assert queue.cleanup(finished_before=LATER) == 500
    queue.close()
