"""A real transaction pooler: nothing is lost, and nothing leaks to its other clients."""

from __future__ import annotations

import collections.abc as cabc
import contextlib
import datetime as dt
import pathlib
import time
import typing as t
import uuid

import psycopg
import pytest
from faults.accounting import accounted
from faults.bouncer import MISSING, Bouncer, version
from faults.crew import Hand, at_work, begun, done, query
from faults.deeds import Deed, effects
from faults.test_refusals import Role
from faults.test_restarts import Producer
from fixtures.waiting import eventually

import venturi

pytestmark = [pytest.mark.faults, pytest.mark.skipif(version() == (0, 0), reason=MISSING)]

Hire = cabc.Callable[..., Hand]
Pool = cabc.Callable[..., Bouncer]

since_1_21 = pytest.mark.skipif(version() < (1, 21), reason="max_prepared_statements came with PgBouncer 1.21")
SETTINGS = [
    pytest.param({}, id="defaults"),
    pytest.param({"default_pool_size": 2}, id="two sessions for all"),
    pytest.param({"max_prepared_statements": 0}, id="prepares nothing", marks=since_1_21),
    pytest.param({"max_prepared_statements": 100}, id="prepares", marks=since_1_21),
]
STRICT = """
    CREATE FUNCTION {q}.strict() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN
        IF current_setting('transaction_isolation') <> 'read committed' THEN
            RAISE EXCEPTION 'at another level' USING ERRCODE = '25001';
        END IF;
        RETURN NULL; END$$"""


@venturi.task("keyed")
class Keyed:
    key: str

    def dedup_key(self) -> str:
        return self.key


@pytest.fixture
def pool(dsn: str) -> cabc.Iterator[Pool]:
    """Puts a PgBouncer before the server; it is gone after the test."""
    with contextlib.ExitStack() as opened:

        def pool(dsn: str = dsn, **settings: t.Any) -> Bouncer:
            bouncer = Bouncer(dsn, **settings)
            opened.callback(bouncer.close)
            return bouncer

        yield pool


def leaked(bouncer: Bouncer, sessions: int) -> list[str]:
    """What another client of the pooler finds in the server's sessions that is not of its own making."""
    found: list[str] = []
    with contextlib.ExitStack() as opened:
        for _ in range(sessions):  # at once, so that each has another one
            connection = opened.enter_context(psycopg.connect(bouncer.dsn, prepare_threshold=None))
            found += [
                row[0]
                for row in connection.execute("""
                SELECT format('%s = %s', name, setting) FROM pg_settings
                 WHERE source = 'session' AND name NOT IN ('application_name', 'client_encoding', 'DateStyle',
                                                           'TimeZone', 'standard_conforming_strings', 'IntervalStyle')
                UNION ALL SELECT statement FROM pg_prepared_statements
                UNION ALL SELECT format('LISTEN %s', c) FROM pg_listening_channels() c
                UNION ALL SELECT format('lock %s of %s', objid, pid) FROM pg_locks WHERE locktype = 'advisory'""")
            ]
    return found


def produce(queue: venturi.Queue) -> list[uuid.UUID]:
    """Everything that producers and operators do; the jobs that are to be completed."""
    jobs = [queue.enqueue(Deed(act, once=act == "fail")).id for act in ("sleep", "pause", "fail")]
    jobs += [receipt.id for receipt in queue.enqueue_many(Deed("sleep", 0.005) for _ in range(20))]
    later = dt.timedelta(hours=1)
    first, second = (queue.enqueue(Keyed("key"), delay=later) for _ in range(2))
    merged = queue.enqueue_many([Keyed("key"), Keyed("other")], delay=later)
    assert first.id == second.id == merged[0].id
    for job in {receipt.id for receipt in merged}:
        assert queue.cancel(job)
    queue.enqueue(Deed("permanent"))
    for dead in queue.jobs(status="dead"):
        queue.requeue(dead.id)  # to die again
    queue.stats()
    assert queue.cleanup(finished_before=dt.datetime.now(dt.UTC), status="cancelled") == 2
    return jobs


def produced(dsn: str, schema: str, jobs: list[uuid.UUID], log: pathlib.Path) -> None:
    """Make sure that these jobs are completed, and that all others are accounted for."""
    __tracebackhide__ = True
    accounted(dsn, schema, jobs, effects=effects(log), statuses=("completed", "cancelled", "dead"))
    others = "SELECT id, status FROM {q}.all_jobs WHERE id = ANY (%s) AND status <> 'completed'"
    assert query(dsn, schema, others, jobs) == []


def test_what_a_client_leaves_in_a_session_of_the_pooler_is_found(pool: Pool) -> None:
    """Each sort of leak, by the check that the tests here rely on."""
    bouncer = pool(default_pool_size=1)
    with psycopg.connect(bouncer.dsn, autocommit=True) as connection:
        for statement in (
            "SET lock_timeout = 7",
            "PREPARE left_behind AS SELECT 1",
            "LISTEN left_behind",
            "SELECT pg_advisory_lock(7)",
        ):
            connection.execute(statement, prepare=False)
    found = leaked(bouncer, 1)
    bouncer.kill()
    for trace in ("lock_timeout = 7", "PREPARE left_behind", "LISTEN left_behind", "lock 7 of"):
        assert any(each.startswith(trace) for each in found), found


@pytest.mark.conformance(248)
@pytest.mark.parametrize("listens", [True, False], ids=["listens directly", "polls"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_load_through_a_pooler_that_is_killed_in_between_is_accounted_for(
    settings: dict[str, t.Any], listens: bool,
    pool: Pool, dsn: str, schema: str, hire: Hire, log: pathlib.Path,
) -> None:  # fmt: skip
    """Producers and workers share a few sessions of the server, lose them all at once, and come back by themselves.

    Case 121.
    """
    bouncer = pool(**settings)
    options = {"pooler": True, **({"listen_dsn": dsn} if listens else {})}
    queue: venturi.Queue = venturi.Queue(schema, dsn=bouncer.dsn, pooler=True)
    hands = [hire(bouncer.dsn, concurrency=4, lease=3, poll=0.5, queue=options) for _ in range(2)]
    at_work(dsn, schema, *hands)
    jobs = [job for _ in range(8) for job in produce(queue)]
    with Producer(queue, 0.005) as producer:
        begun(log, 200)
        bouncer.kill()
        time.sleep(0.5)
        killed_for = len(producer.ids)
        bouncer.start()
        back = time.monotonic()
        eventually(lambda: len(producer.ids) > killed_for + 50, 15, what="jobs are enqueued again")
        jobs += produce(queue)
    done(dsn, schema, 30)
    took = time.monotonic() - back
    print(f"\ndone {took:.1f} s after PgBouncer is back; enqueues failed {dict(producer.errors)}")
    for hand in hands:
        hand.stops()
    queue.close()
    assert leaked(bouncer, settings.get("default_pool_size", 8)) == []
    bouncer.kill()
    # An enqueue whose answer was cut off may have been committed: its job is among the effects, not among ours.
    produced(dsn, schema, [*jobs, *producer.ids], log)
    for hand in hands:
        assert "prepared statement" not in hand.words
        assert "Traceback" not in hand.words


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_pooler_that_nobody_mentioned_is_noticed_and_nothing_leaks_to_its_other_clients(
    settings: dict[str, t.Any], pool: Pool, dsn: str, schema: str, hire: Hire, log: pathlib.Path
) -> None:
    """Without pooler=True producers and polling workers do with one what they do with it."""
    bouncer = pool(**settings)
    queue: venturi.Queue = venturi.Queue(schema, dsn=bouncer.dsn)
    hand = hire(bouncer.dsn, concurrency=4, lease=3, poll=0.5, queue={"notify": False})
    at_work(dsn, schema, hand)
    jobs = [job for _ in range(8) for job in produce(queue)]
    done(dsn, schema)
    hand.stops()
    queue.close()
    assert "trouble" not in hand.words, hand.words
    assert leaked(bouncer, settings.get("default_pool_size", 8)) == []
    bouncer.kill()
    produced(dsn, schema, jobs, log)


@pytest.mark.parametrize("through", ["dsn", "listen_dsn"])
def test_a_worker_that_would_listen_through_a_transaction_pooler_says_so_at_once(
    through: str, pool: Pool, dsn: str, schema: str
) -> None:
    """No notification would ever come, so that it fails with ConfigError and leaves nothing in the pool (case 114)."""
    bouncer = pool()
    where = (bouncer.dsn, None) if through == "dsn" else (dsn, bouncer.dsn)
    queue: venturi.Queue = venturi.Queue(schema, dsn=where[0], listen_dsn=where[1])

    @queue.handler
    def deed(task: Deed) -> None:
        pass

    with pytest.raises(venturi.ConfigError, match="pooler=True"):
        queue.work(block=False).join(10)
    queue.close()
    assert leaked(bouncer, 4) == []
    bouncer.kill()


def test_a_session_pooler_gives_a_worker_all_it_needs(
    pool: Pool, dsn: str, schema: str, hire: Hire, log: pathlib.Path
) -> None:
    """Every client has a session of its own there: the worker listens, and is woken."""
    bouncer = pool(pool_mode="session")
    hand = hire(bouncer.dsn, concurrency=2, poll=60)
    at_work(dsn, schema, hand)
    parked = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock'"
    eventually(lambda: query(dsn, schema, parked), 10, what="the worker has parked")
    queue: venturi.Queue = venturi.Queue(schema, dsn=bouncer.dsn)
    job = queue.enqueue(Deed()).id
    done(dsn, schema, 2)
    hand.stops()
    queue.close()
    bouncer.kill()
    accounted(dsn, schema, [job], effects=effects(log))


@pytest.mark.parametrize("level", ["serializable", "repeatable read"])
def test_every_write_behind_a_pooler_is_at_read_committed_whatever_the_roles_default(
    level: str, pool: Pool, dsn: str, schema: str, hire: Hire, log: pathlib.Path
) -> None:
    """There each transaction says so itself, since a setting of the session would not last."""
    role = Role(dsn, schema)
    role.run(t.cast(t.Any, f"ALTER ROLE {{role}} SET default_transaction_isolation = '{level}'"))
    role.run("GRANT SELECT ON ALL TABLES IN SCHEMA {q} TO {role}")
    query(dsn, schema, STRICT)
    for table in ("jobs", "live", "journal", "dead", "cancels", "workers"):
        made = f"CREATE TRIGGER strict AFTER INSERT OR UPDATE OR DELETE ON {{q}}.{table}"
        query(dsn, schema, t.cast(t.Any, made + " EXECUTE FUNCTION {q}.strict()"))
    bouncer = pool(role.dsn)
    queue: venturi.Queue = venturi.Queue(schema, dsn=bouncer.dsn, pooler=True)
    hand = hire(bouncer.dsn, concurrency=4, lease=1, poll=0.5, queue={"pooler": True})
    at_work(dsn, schema, hand)
    jobs = produce(queue)
    jobs.append(queue.enqueue(Deed("sleep", 1.5)).id)  # long enough for renewals
    done(dsn, schema)
    hand.stops()
    queue.close()
    bouncer.kill()
    assert "trouble" not in hand.words, hand.words
    produced(dsn, schema, jobs, log)
    role.run("DROP OWNED BY {role}; DROP ROLE {role}")


def test_what_the_database_refuses_to_store_behind_a_pooler_is_settled_without_it(
    pool: Pool, queue: venturi.Queue, dsn: str, schema: str, hire: Hire, log: pathlib.Path
) -> None:
    """A transaction that failed half-way is rolled back, and its session serves the next one."""
    query(
        dsn,
        schema,
        """
        CREATE FUNCTION {q}.refuse() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN
            IF NEW.traceback IS NOT NULL THEN RAISE EXCEPTION 'no'; END IF; RETURN NEW; END$$;
        CREATE TRIGGER refuse BEFORE INSERT ON {q}.journal FOR EACH ROW EXECUTE FUNCTION {q}.refuse()""",
    )
    bouncer = pool()
    jobs = [queue.enqueue(Deed(act, once=True)).id for act in ("sleep", "fail", "sleep")]
    hand = hire(bouncer.dsn, concurrency=4, lease=3, poll=0.5, queue={"pooler": True})
    done(dsn, schema)
    hand.stops()
    bouncer.kill()
    assert "trouble" not in hand.words, hand.words
    assert accounted(dsn, schema, jobs, effects=effects(log)) == {"completed": 3, "retried": 1}
    assert "refused to store" in (queue.journal(jobs[1])[0].note or "")
