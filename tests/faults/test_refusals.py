"""A server that refuses: limits of the role, a full disk, rights that are taken away, and rows that are changed."""

from __future__ import annotations

import collections.abc as cabc
import pathlib
import time
import typing as t

import psycopg
import pytest
from faults.accounting import accounted
from faults.crew import Hand, at_work, begun, done, query
from faults.deeds import Deed, effects
from fixtures.work import ended
from psycopg import conninfo, sql

import venturi
from venturi.store import migrate

pytestmark = pytest.mark.faults

Hire = cabc.Callable[..., Hand]

GRANT = """
    GRANT USAGE ON SCHEMA {q} TO {role};
    GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {q} TO {role}"""
REVOKE = """
    REVOKE ALL ON SCHEMA {q} FROM {role};
    REVOKE ALL ON ALL TABLES IN SCHEMA {q} FROM {role}"""

SLOW_TABLES = """
    CREATE FUNCTION slow_table() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(0.05); END';
    CREATE EVENT TRIGGER slow_table ON ddl_command_end WHEN TAG IN ('CREATE TABLE') EXECUTE FUNCTION slow_table()"""


class Role:
    """A role that may use one queue, and nothing else.

    Attributes:
        dsn: The connection string with its name.
    """

    def __init__(self, dsn: str, schema: str) -> None:
        self.name = f"role_{schema}"
        self.dsn = conninfo.make_conninfo(dsn, user=self.name)
        self._admin = dsn
        self._schema = schema
        self.run("CREATE ROLE {role} LOGIN;" + GRANT)

    def run(self, text: t.LiteralString) -> None:
        """Run statements about it as the superuser."""
        names = {"role": sql.Identifier(self.name), "q": sql.Identifier(self._schema)}
        with psycopg.connect(self._admin, autocommit=True) as connection:
            connection.execute(sql.SQL(text).format(**names))


@pytest.fixture
def role(dsn: str, schema: str) -> cabc.Iterator[Role]:
    """A role for the queue."""
    role = Role(dsn, schema)
    yield role
    role.run("DROP OWNED BY {role}; DROP ROLE {role}")


def test_a_roles_default_limits_do_not_reach_the_queues_sessions(
    role: Role, dsn: str, schema: str, hire: Hire, log: pathlib.Path
) -> None:
    """Timeouts far too short, serializable and read-only by default: the queue's own sessions say otherwise.

    Cases 043, 047, 118, 124.
    """
    role.run("""
        ALTER ROLE {role} SET statement_timeout = '50ms'; ALTER ROLE {role} SET lock_timeout = '20ms';
        ALTER ROLE {role} SET idle_in_transaction_session_timeout = '50ms';
        ALTER ROLE {role} SET idle_session_timeout = '300ms';
        ALTER ROLE {role} SET default_transaction_isolation = 'serializable';
        ALTER ROLE {role} SET default_transaction_read_only = on""")
    if query(dsn, schema, "SELECT name FROM pg_settings WHERE name = 'transaction_timeout'"):
        role.run("ALTER ROLE {role} SET transaction_timeout = '50ms'")
    queue: venturi.Queue = venturi.Queue(schema, dsn=role.dsn)
    hand = hire(role.dsn, concurrency=2, lease=3, poll=60)
    at_work(dsn, schema, hand)
    jobs = [receipt.id for receipt in queue.enqueue_many(Deed("sleep", 0.5) for _ in range(4))]
    with psycopg.connect(dsn) as blocker:
        blocker.execute(sql.SQL("LOCK TABLE {}.live IN EXCLUSIVE MODE").format(sql.Identifier(schema)))
        time.sleep(1)  # far longer than the role's limits
    done(dsn, schema)
    time.sleep(1)  # idle
    jobs.append(queue.enqueue(Deed()).id)
    done(dsn, schema)
    hand.stops()
    queue.close()
    assert accounted(dsn, schema, jobs, effects=effects(log)) == {"completed": 5}
    assert "WARNING" not in hand.words, hand.words


def test_a_migration_sets_its_own_limits(role: Role, dsn: str, schema: str) -> None:
    """A role whose statements end after a moment migrates all the same (case 124)."""
    role.run("""
        ALTER ROLE {role} SET statement_timeout = '20ms'; ALTER ROLE {role} SET lock_timeout = '20ms';
        ALTER ROLE {role} SET default_transaction_read_only = on; DROP SCHEMA {q} CASCADE;
        GRANT CREATE ON DATABASE postgres TO {role}""")
    query(dsn, schema, SLOW_TABLES)
    try:
        assert migrate.migrate(role.dsn, schema)
    finally:
        query(dsn, schema, "DROP FUNCTION slow_table CASCADE")
    accounted(dsn, schema)


@pytest.mark.parametrize("code", ["53100", "57014", "40001", "25006"])
def test_writes_that_are_refused_for_a_while_are_made_later(
    code: str, queue: venturi.Queue, dsn: str, schema: str, hire: Hire, log: pathlib.Path
) -> None:
    """A full disk, and errors like it: enqueues raise, workers wait, and what handlers did is recorded once.

    Cases 076, 117.
    """
    jobs = [receipt.id for receipt in queue.enqueue_many(Deed("sleep", 0.2) for _ in range(30))]
    hand = hire(concurrency=4, lease=6, poll=1)
    begun(log, 4)
    refusal: t.LiteralString = """
        CREATE FUNCTION {q}.refuse() RETURNS trigger LANGUAGE plpgsql
            AS $$BEGIN RAISE EXCEPTION 'no' USING ERRCODE = TG_ARGV[0]; END$$"""
    query(dsn, schema, refusal)
    trigger = "CREATE TRIGGER refuse BEFORE INSERT OR UPDATE OR DELETE ON {{q}}.{} FOR EACH ROW EXECUTE FUNCTION "
    for table in ("jobs", "live", "journal"):
        query(dsn, schema, t.cast(t.Any, f"{trigger.format(table)}{{q}}.refuse('{code}')"))
    with pytest.raises(psycopg.Error):
        queue.enqueue(Deed())
    time.sleep(2)
    query(dsn, schema, "DROP FUNCTION {q}.refuse() CASCADE")
    jobs.append(queue.enqueue(Deed()).id)
    done(dsn, schema, 30)
    hand.stops()
    assert "database trouble" in hand.words
    assert accounted(dsn, schema, jobs, effects=effects(log)) == {"completed": 31}


LOSSES: dict[str, tuple[t.LiteralString, t.LiteralString]] = {
    "rights": (REVOKE, GRANT),
    "login": ("ALTER ROLE {role} NOLOGIN", "ALTER ROLE {role} LOGIN"),
    "connections": ("ALTER ROLE {role} CONNECTION LIMIT 0", "ALTER ROLE {role} CONNECTION LIMIT -1"),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_role_that_loses_its_rights_and_gets_them_back_goes_on(
    loss: str, role: Role, queue: venturi.Queue, dsn: str, schema: str, hire: Hire, log: pathlib.Path
) -> None:
    """The worker waits as in an outage, needs no help, and loses no result (case 117)."""
    jobs = [receipt.id for receipt in queue.enqueue_many(Deed("sleep", 0.2) for _ in range(30))]
    hand = hire(role.dsn, concurrency=4, lease=6, poll=1)
    begun(log, 4)
    role.run(LOSSES[loss][0])
    assert query(dsn, schema, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", role.name)
    time.sleep(3)
    assert hand.process.poll() is None, hand.words
    role.run(LOSSES[loss][1])
    done(dsn, schema, 30)
    hand.stops()
    outcomes = accounted(dsn, schema, jobs, effects=effects(log))
    assert outcomes["completed"] == 30
    assert sorted(each.job for each in effects(log) if each.what == "start") == sorted(jobs)


@pytest.mark.parametrize("change", [
    "DELETE FROM {q}.live WHERE owner IS NOT NULL",
    "TRUNCATE {q}.live",
    "UPDATE {q}.live SET owner = gen_random_uuid()",
    "UPDATE {q}.live SET run_count = run_count + 1",
])  # fmt: skip
def test_rows_that_are_changed_by_hand_while_they_run_stop_nothing(
    change: t.LiteralString, queue: venturi.Queue, dsn: str, schema: str, hire: Hire, log: pathlib.Path
) -> None:
    """The result is refused and logged, the slot is free again, and other jobs are completed (case 074)."""
    doomed = queue.enqueue(Deed("sleep", 0.5)).id
    hand = hire(concurrency=1, lease=1, poll=1)
    begun(log, 1)
    query(dsn, schema, change)
    other = queue.enqueue(Deed()).id
    ended(queue, other, timeout=10)
    done(dsn, schema)
    hand.stops()
    assert str(doomed) in hand.words
    assert "is not recorded" in hand.words
