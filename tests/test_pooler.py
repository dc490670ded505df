"""Behind a transaction pooler: nothing that belongs to a session outlives its transaction."""

from __future__ import annotations

import collections.abc as cabc
import datetime as dt
import re
import time
import typing as t
import uuid

import psycopg
import pytest
from fixtures.serverlog import ServerLog
from fixtures.sqltext import on
from fixtures.waiting import eventually
from fixtures.work import ended, until, working

import venturi

Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[t.Any]]


@pytest.fixture
def schema(emptied: str) -> str:
    """All tests here are content with one schema, emptied in between."""
    return emptied


@venturi.task("work")
class Work:
    end: str = "return"
    key: str | None = None

    def dedup_key(self) -> str | None:
        return self.key


@pytest.fixture
def pooled(schema: str, server_log: ServerLog) -> cabc.Iterator[venturi.Queue]:
    """A queue that believes in a pooler, and whose statements are all written down."""
    queue = venturi.Queue(schema, dsn=server_log.dsn, pooler=True)

    @queue.handler
    def handle(task: Work, ctx: venturi.Context) -> venturi.Outcome:
        match task.end:
            case "retry":
                raise venturi.RetryLater(dt.timedelta(0)) if ctx.run_count == 1 else venturi.PermanentError("done")
            case "pause":
                return venturi.Pause() if ctx.run_count == 1 else None
            case _:
                return venturi.Completed(str(len(ctx.history)))

    yield queue
    queue.close()


def live(pooled: venturi.Queue, connect: Connect) -> None:
    """Everything that producers, operators and workers do, recovery included."""
    lost = pooled.enqueue(Work()).id
    with connect(autocommit=True) as connection:
        connection.execute(
            on(
                pooled.schema,
                """UPDATE {schema}.live SET owner = %s, run_count = 1, lease_until = now() - interval '1 s'""",
            ),
            [uuid.uuid4()],
        )
    with working(pooled, poll=0.05, lease=1):
        until(pooled, lost, "recovered")
        retried, paused = pooled.enqueue(Work("retry")).id, pooled.enqueue(Work("pause")).id
        merged = pooled.enqueue(Work(key="k"), delay=dt.timedelta(hours=1)).id
        pooled.enqueue_many([Work(key="k"), *[Work() for _ in range(20)]], delay=dt.timedelta(0))
        ended(pooled, merged)
        ended(pooled, retried, "dead")
        ended(pooled, paused)
        assert pooled.requeue(retried, delay=dt.timedelta(hours=1))
        assert pooled.cancel(retried)
        eventually(lambda: pooled.stats().kinds["work"].ready == 0)


@pytest.mark.conformance(248)
def test_everything_works_behind_a_pooler_with_nothing_of_a_session(
    pooled: venturi.Queue, server_log: ServerLog, connect: Connect
) -> None:
    """No prepared statement, no LISTEN, no setting and no lock outlives its transaction (cases 114, 121)."""
    for _ in range(6):  # as often as makes psycopg prepare a statement elsewhere
        pooled.stats()
    live(pooled, connect)
    statements = server_log.statements()
    assert len(statements) > 50
    assert [each.text for each in statements if each.prepared is not None] == []
    lasting = re.compile(r"^(LISTEN|SET |PREPARE|DECLARE)|set_config.*false\)|advisory_lock_shared|pg_advisory_lock\(")
    assert [each.text for each in statements if lasting.search(each.text.strip())] == []


@pytest.mark.conformance(248)
def test_no_lock_is_held_between_transactions(pooled: venturi.Queue, connect: Connect) -> None:
    """A worker that has nothing to do, and producers that have been at work, hold none at all."""
    with connect(autocommit=True) as connection, working(pooled, poll=60):
        ended(pooled, pooled.enqueue(Work(key="k")).id)
        time.sleep(0.3)  # as long as a worker may take to park
        locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid <> pg_backend_pid()"
        eventually(lambda: connection.execute(locks).fetchone() == (0,))


@pytest.mark.conformance(248)
def test_a_worker_behind_a_pooler_listens_where_it_is_told_to(
    schema: str, dsn: str, server_log: ServerLog, connect: Connect
) -> None:
    """With listen_dsn, which leads around the pooler, it is woken as any other (case 114)."""
    queue = venturi.Queue(schema, dsn=server_log.dsn, listen_dsn=dsn, pooler=True)
    producer = venturi.Queue(schema, dsn=server_log.dsn, pooler=True)

    @queue.handler
    def handle(task: Work) -> None:
        pass

    with connect(autocommit=True) as connection, working(queue, poll=60):
        locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock' AND granted"
        eventually(lambda: connection.execute(locks).fetchone() == (1,))
        ended(queue, producer.enqueue(Work()).id, timeout=1)
    assert server_log.statements("LISTEN") == []
    queue.close()
    producer.close()
