"""A start that can never work says so, and one that may work later says what it waits for."""

from __future__ import annotations

import collections.abc as cabc
import logging
import threading
import typing as t

import psycopg
import pytest
from faults.crew import done, query
from faults.deeds import Deed
from faults.test_refusals import REVOKE, Role
from fixtures.waiting import eventually
from psycopg import sql

import venturi

pytestmark = pytest.mark.faults


@pytest.fixture
def role(dsn: str, schema: str) -> cabc.Iterator[Role]:
    """A role for the queue."""
    role = Role(dsn, schema)
    yield role
    role.run("DROP OWNED BY {role}; DROP ROLE {role}")


def queue_of(role: Role, schema: str) -> venturi.Queue:
    queue: venturi.Queue = venturi.Queue(schema, dsn=role.dsn)

    @queue.handler
    def deed(task: Deed) -> None:
        pass

    return queue


@pytest.mark.parametrize(("lost", "named"), [
    (REVOKE, "USAGE on the schema"),
    ("REVOKE DELETE ON {q}.live FROM {role}", "it lacks DELETE on live$"),
    ("REVOKE INSERT, UPDATE ON {q}.workers, {q}.journal FROM {role}",
     "it lacks INSERT on journal, INSERT on workers, UPDATE on workers$"),
])  # fmt: skip
@pytest.mark.parametrize("block", [True, False])
def test_a_worker_whose_role_lacks_rights_at_its_start_names_them(
    lost: t.LiteralString, named: str, block: bool, role: Role, queue: venturi.Queue, schema: str
) -> None:
    """It ends with SchemaError at once, and touches no job (case 150)."""
    job = queue.enqueue(Deed()).id
    role.run(lost)
    refused = queue_of(role, schema)
    stop = threading.Event()
    limit = threading.Timer(10, stop.set)
    limit.start()
    with pytest.raises(venturi.SchemaError, match=named):
        refused.work(signals=False, stop=stop) if block else refused.work(block=False)
    limit.cancel()
    refused.close()
    untouched = queue.job(job)
    assert untouched is not None
    assert (untouched.status, untouched.run_count) == ("pending", 0)
    assert queue.journal(job) == []


def test_a_right_to_some_columns_may_be_enough(role: Role, dsn: str, schema: str) -> None:
    """What works is not refused at the start."""
    role.run("""REVOKE UPDATE ON {q}.live FROM {role};
        GRANT UPDATE (owner, lease_until, run_count, failure_count, visible_at, carry) ON {q}.live TO {role}""")
    queue = queue_of(role, schema)
    queue.enqueue(Deed())
    with queue.work(block=False):
        done(dsn, schema)
    assert [job.status for job in queue.jobs()] == ["completed"]
    queue.close()


def test_rights_that_are_granted_make_the_next_start_work(role: Role, dsn: str, schema: str) -> None:
    """The refusal of a first start is not remembered."""
    role.run("REVOKE DELETE ON {q}.live FROM {role}")
    queue = queue_of(role, schema)
    queue.enqueue(Deed())
    with pytest.raises(venturi.SchemaError):
        queue.work(block=False)
    role.run("GRANT DELETE ON {q}.live TO {role}")
    with queue.work(block=False):
        done(dsn, schema)
    assert [job.status for job in queue.jobs()] == ["completed"]
    queue.close()


def test_row_level_security_that_hides_jobs_is_said_once(
    role: Role, dsn: str, schema: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A policy may be meant, so that the worker works, on what it may see."""
    role.run("ALTER TABLE {q}.live ENABLE ROW LEVEL SECURITY")
    queue = queue_of(role, schema)
    owner: venturi.Queue = venturi.Queue(schema, dsn=dsn)  # who sees and writes everything
    owner.enqueue(Deed())
    with caplog.at_level(logging.WARNING, "venturi.worker"):
        with queue.work(block=False), queue.work(block=False):
            eventually(lambda: query(dsn, schema, "SELECT count(*) FROM {q}.workers") == [(2,)])
        assert [record.message for record in caplog.records if "row-level security" in record.message] == [
            f"row-level security is in force for the role '{role.name}' in the schema '{schema}' (live): jobs that its "
            "policies hide are never run"
        ]
    assert [each.status for each in owner.jobs()] == ["pending"]
    role.run("CREATE POLICY all_rows ON {q}.live TO {role} USING (true)")
    with queue.work(block=False):
        done(dsn, schema)
    assert [each.status for each in owner.jobs()] == ["completed"]
    for each in (queue, owner):
        each.close()


def test_a_schema_without_row_level_security_warns_of_nothing(
    role: Role, dsn: str, schema: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The grants of an ordinary role start a worker without a word."""
    queue = queue_of(role, schema)
    queue.enqueue(Deed())
    with caplog.at_level(logging.WARNING), queue.work(block=False):
        done(dsn, schema)
    queue.close()
    assert caplog.records == []
    with psycopg.connect(dsn) as connection:
        count = sql.SQL("SELECT count(*) FROM {}.journal").format(sql.Identifier(schema))
        assert connection.execute(count).fetchone() == (1,)
