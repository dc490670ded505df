"""What the worker's statements cost, in buffers, however the table and its statistics stand.

A plan that goes wrong reads the table or an index as a whole, so that its cost grows with the table while that of a
right one does not. A tenth of the promised sizes shows the difference as well; VENTURI_TEST_SIZE=1 tries all of it.
"""

from __future__ import annotations

import collections.abc as cabc
import itertools
import os
import time
import typing as t
import uuid

import psycopg
import pytest
from fixtures.claims import claiming, completed, fill, registry
from fixtures.waiting import eventually
from fixtures.work import working
from psycopg import sql

import venturi
from venturi.registry import Handler
from venturi.store import migrate
from venturi.store.claiming import Ask, Claim
from venturi.store.claiming_sql import CLAIM, CLAIM_MANY, EXPIRED, NEXT_DUE, STRAYS
from venturi.store.connections import Session
from venturi.store.looking_sql import CLEANUP, JOBS_BETWEEN, JOBS_OF
from venturi.store.sql import Sql
from venturi.worker.lanes import Lanes
from venturi.worker.marks import Marks
from venturi.worker.rotation import Rotation

pytestmark = pytest.mark.slow

Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[tuple[t.Any, ...]]]

SIZE = float(os.environ.get("VENTURI_TEST_SIZE", "0.1"))
BATCH = 50
PER_LANE = 20
PER_JOB = 50
SETTLED = 13
"""Buffers that the settle of one job touches."""

KIND, FOREIGN, CAPPED = "plan.step", "plan.foreign", "plan.capped"


@venturi.task(KIND)
class Step:
    pass


@venturi.task(CAPPED)
class Capped:
    pass


def numbered(number: int) -> type[t.Any]:
    """One task of many."""

    @venturi.task(f"plan.number{number}")
    class Numbered:
        pass

    return Numbered


NUMBERED = [numbered(number) for number in range(30)]


@venturi.task("plan.keyed")
class Keyed:
    number: int

    def dedup_key(self) -> str:
        return str(self.number)


def size(promised: int) -> int:
    """The promised number of jobs, scaled."""
    return int(promised * SIZE)


def nothing(task: object) -> None:
    """A handler."""


class Bench:
    """Claims as a worker with 50 free slots does, whose other kind is at its cap, and measures what it costs."""

    def __init__(self, schema: str, session: Session, *, slots: int = BATCH) -> None:
        self.statements = claiming(schema)
        self._sql = Sql(schema)
        self._session = session
        handlers = registry(Handler(nothing, task=Step), Handler(nothing, task=Capped, cap=1))
        self._lanes = Lanes(handlers, slots + 1, Rotation(4, 0), Marks())
        running = Claim(str(uuid.uuid4()), CAPPED, venturi.Priority.NORMAL, 1, 0, None, 0.0, 0.0, "{}", None)
        self._lanes.claimed([running])
        self._clock = itertools.count()

    def ask(self) -> Ask:
        """What to claim, a tenth of a second after the claim before."""
        ask = self._lanes.ask(next(self._clock) / 10)
        assert ask is not None
        return ask

    def claim(self) -> int:
        """Claim a batch and settle it; how many jobs it held."""
        claims = self.statements.turn(self._session, [], self.ask()).claims
        self._lanes.claimed(claims)
        self._lanes.ended(each.kind for each in claims)
        if claims:
            assert self.statements.settle(self._session, completed(claims, self.statements.owner)) == []
        return len(claims)

    def cost(self) -> tuple[int, int]:
        """The buffers that a claim touches, and how many jobs it takes; it is rolled back."""
        ask = self.ask()
        parameters = self.statements._claim(ask)  # pyright: ignore[reportPrivateUsage]
        with self._session.transaction(force_rollback=True):
            return explained(self._session, self._sql(CLAIM), parameters)

    def check(self) -> None:
        """Claim a batch; fail when it touches more than is promised."""
        buffers, jobs = self.cost()
        assert jobs == BATCH
        assert buffers <= PER_JOB * jobs + PER_LANE * 6


def explained(session: Session, statement: bytes, parameters: tuple[object, ...] | None = None) -> tuple[int, int]:
    """The buffers that the statement touches, and its rows."""
    cursor = session.execute(b"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + statement, parameters, prepare=False)
    row = cursor.fetchone()
    assert row is not None
    plan = row[0][0]["Plan"]
    return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"], int(plan["Actual Rows"])


@pytest.fixture(scope="module")
def crowded(dsn: str) -> cabc.Iterator[str]:
    """A queue with many scheduled jobs, and in front of the ready ones many of a foreign and of a capped kind."""
    schema = f"crowded_{uuid.uuid4().hex[:12]}"
    migrate.migrate(dsn, schema)
    with psycopg.connect(dsn, autocommit=True) as connection:
        first = itertools.count(step=10_000_000)
        fill(connection, schema, size(500_000), FOREIGN, start="-2 days", first=next(first))
        fill(connection, schema, size(500_000), CAPPED, start="-2 days", first=next(first))
        fill(connection, schema, size(300_000), KIND, start="1 hour", first=next(first))
        fill(connection, schema, 4 * BATCH, KIND, start="-1 hour", first=next(first))
    yield schema
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SET client_min_messages = warning")
        connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(schema)))


@pytest.mark.conformance(237)
def test_a_claim_costs_the_same_behind_any_crowd(crowded: str, session: Session) -> None:
    """At most 50 buffers for each job and 20 for each lane, among scheduled jobs and behind foreign and capped ones.

    Case 095.
    """
    Bench(crowded, session).check()
    session.execute(sql.SQL("ANALYZE {}.live").format(sql.Identifier(crowded)))
    Bench(crowded, session).check()


@pytest.mark.conformance(238)
def test_the_next_due_time_is_found_at_the_head_of_each_lane(crowded: str, session: Session) -> None:
    """At most 10 buffers for each lane, once what other tests have claimed here is vacuumed."""
    session.execute(sql.SQL("VACUUM {}").format(sql.Identifier(crowded, "live")))
    kinds, tiers = [KIND] * 3 + [FOREIGN] * 3, [0, 1, 2] * 2
    buffers, _ = explained(session, Sql(crowded)(NEXT_DUE), (kinds, tiers))
    assert buffers <= 10 * len(kinds)


@pytest.mark.conformance(239)
def test_a_claim_needs_no_statistics(schema: str, session: Session) -> None:
    """The table is full, and nothing is known of it."""
    fill(session, schema, size(100_000), KIND)
    assert session.execute("SELECT count(*) FROM pg_stats WHERE schemaname = %s", (schema,)).fetchone() == (0,)
    Bench(schema, session).check()


@pytest.mark.conformance(239)
def test_a_claim_stands_statistics_of_an_empty_table(schema: str, session: Session) -> None:
    """They say that there is nothing to read, as always when a queue is analyzed in a quiet moment."""
    for table in ("jobs", "live"):
        session.execute(sql.SQL("VACUUM ANALYZE {}").format(sql.Identifier(schema, table)))
    fill(session, schema, size(100_000), KIND)
    Bench(schema, session).check()


@pytest.mark.conformance(239)
def test_a_claim_stands_a_plan_that_was_cached_on_a_one_page_table(schema: str, session: Session) -> None:
    """The plan of a new installation, kept while the table grows."""
    fill(session, schema, 3, KIND)
    bench = Bench(schema, session)
    session.execute("SET plan_cache_mode = force_generic_plan")
    statement = Sql(schema)(CLAIM)
    numbered = b"".join(
        part + (b"$%d" % n if n else b"") for n, part in zip([*range(1, 13), 0], statement.split(b"%s"), strict=True)
    )
    session.execute(b"PREPARE claim AS " + numbered.replace(b"%%", b"%"), prepare=False)

    def cost() -> tuple[int, int]:
        parameters = bench.statements._claim(bench.ask())  # pyright: ignore[reportPrivateUsage]
        values = sql.SQL(", ").join(map(sql.Literal, parameters)).as_bytes(session)
        with session.transaction(force_rollback=True):
            return explained(session, b"EXECUTE claim (" + values + b")")

    assert cost()[1] == 3
    fill(session, schema, size(100_000), KIND, first=10)
    buffers, jobs = cost()
    assert jobs == BATCH
    assert buffers <= PER_JOB * jobs + PER_LANE * 6
    plans = session.execute("SELECT generic_plans, custom_plans FROM pg_prepared_statements WHERE name = 'claim'")
    assert plans.fetchall() == [(2, 0)]


_IN_TURNS = """
UPDATE {schema}.live l SET kind = 'plan.number' || n % 30
  FROM (SELECT id, row_number() OVER (ORDER BY id) AS n FROM {schema}.live) s WHERE s.id = l.id
"""


def many_cost(schema: str, session: Session, slots: int, kinds: int) -> float:
    """The buffers for each job of a claim, by a worker with so many kinds and free slots; it is rolled back."""
    handlers = registry(*(Handler(nothing, task=task) for task in NUMBERED[:kinds]))
    ask = Lanes(handlers, slots, Rotation(4, 0), Marks()).ask(0.0)
    assert ask is not None
    statement = CLAIM if kinds == 1 else CLAIM_MANY
    parameters = claiming(schema)._claim(ask)  # pyright: ignore[reportPrivateUsage]
    with session.transaction(force_rollback=True):
        buffers, jobs = explained(session, Sql(schema)(statement), parameters)
    assert jobs == slots
    return buffers / jobs


@pytest.mark.conformance(237, 239)
@pytest.mark.parametrize("slots", [20, 200])
def test_a_claim_over_thirty_kinds_costs_little_more_than_over_one(schema: str, session: Session, slots: int) -> None:
    """At most twice the buffers for each job, its settle included, with statistics or none.

    Jobs of all kinds became due in turns, so that each claim takes from all of them.
    """
    names = {"schema": sql.Identifier(schema)}
    session.execute(sql.SQL("ANALYZE {schema}.jobs, {schema}.live").format(**names))
    fill(session, schema, size(300_000), KIND, step="1 us")
    session.execute(sql.SQL(_IN_TURNS).format(**names))
    for _ in range(2):
        many, one = (many_cost(schema, session, slots, kinds) for kinds in (30, 1))
        assert many + SETTLED <= 2 * (one + SETTLED)
        session.execute(sql.SQL("ANALYZE {schema}.jobs, {schema}.live").format(**names))


@pytest.mark.conformance(240)
@pytest.mark.parametrize("at_a_time", [1, BATCH])
def test_the_last_claims_of_a_large_batch_cost_no_more_than_twice_the_first(
    schema: str, session: Session, at_a_time: int
) -> None:
    """All of it was enqueued in one call, so that all of it was due at once; no vacuum has been there."""
    jobs = size(100_000)
    session.execute(sql.SQL("ALTER TABLE {}.live SET (autovacuum_enabled = off)").format(sql.Identifier(schema)))
    fill(session, schema, jobs, KIND, step="1 us")
    many, few = Bench(schema, session), Bench(schema, session, slots=at_a_time)
    few.claim()
    first, _ = few.cost()
    while jobs > 1000:
        jobs -= many.claim()
    few.claim()
    few.claim()
    last, count = few.cost()
    assert count == at_a_time
    assert last <= 2 * first


def looks(schema: str, session: Session) -> list[int]:
    """The buffers of a look for claims that have expired, and of one for strays, a thousand jobs deep."""
    found = [
        (EXPIRED, (1000, 100)),
        (STRAYS, ([KIND] * 3, [0, 1, 2], 1000, uuid.uuid4(), "{}", "{}")),
    ]
    return [explained(session, Sql(schema)(statement), parameters)[0] for statement, parameters in found]


@pytest.mark.conformance(239)
@pytest.mark.parametrize("analyzed", [False, True], ids=["unknown", "empty"])
def test_expired_claims_and_strays_are_looked_for_at_the_head_of_each_lane(
    schema: str, session: Session, analyzed: bool
) -> None:
    """A lane is never read as a whole, whatever is known of the table, which is vacuumed more often than analyzed."""
    live = sql.Identifier(schema, "live")
    if analyzed:
        session.execute(sql.SQL("VACUUM ANALYZE {}").format(live))
    fill(session, schema, size(1_000_000), KIND)
    for command in ("SELECT FROM {} LIMIT 0", "VACUUM {}", "ANALYZE {}"):
        session.execute(sql.SQL(command).format(live))
        assert max(looks(schema, session)) <= 100


@pytest.mark.conformance(241)
def test_claims_and_renewals_are_hot_updates(queue: venturi.Queue, session: Session) -> None:
    """At least nine of ten while 4 000 jobs, half of them with a key, drain at concurrency 8 (case 163)."""

    def work(task: object) -> None:
        time.sleep(0.001)

    queue.handler(task=Step)(work)
    queue.handler(task=Keyed)(work)
    queue.enqueue_many([task for n in range(2000) for task in (Step(), Keyed(n))])
    with working(queue, concurrency=8, lease=1):
        eventually(lambda: queue.stats().kinds == {}, 20)

    def updates() -> tuple[int, int]:
        row = session.execute(
            "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE schemaname = %s AND relname = 'live'",
            (queue.schema,),
        ).fetchone()
        assert row is not None
        return row[0], row[1]

    eventually(lambda: updates()[0] > 4000)
    every, hot = updates()
    assert hot >= 0.9 * every


@pytest.mark.conformance(242)
def test_an_old_snapshot_does_not_make_claims_dearer(schema: str, session: Session, connect: Connect) -> None:
    """Its dead rows cannot be removed, and the low-water marks pass over them (case 163)."""
    jobs = size(50_000)
    fill(session, schema, jobs, KIND, start="-1 day", step="100 ms")
    bench = Bench(schema, session)
    bench.claim()
    first, _ = bench.cost()
    reader = connect()
    reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    reader.execute(sql.SQL("SELECT FROM {}.live LIMIT 1").format(sql.Identifier(schema)))
    while jobs > 1000:
        jobs -= bench.claim()
    costs = [bench.cost() for _ in range(2)]
    reader.rollback()
    assert [count for _, count in costs] == [BATCH, BATCH]
    # Of two claims in a row at most one is the one that, once a second, ignores the marks.
    assert min(buffers for buffers, _ in costs) <= 3 * first


_FINISHED = """
WITH numbers AS MATERIALIZED (
  SELECT ('00000000-0000-7000-9000-' || lpad(to_hex(n), 12, '0'))::uuid AS id FROM generate_series(1, {count}) n),
bodies AS (
  INSERT INTO {schema}.jobs (id, kind, payload, priority, created_at)
  SELECT id, {kind}, '{{}}', 1, statement_timestamp() - interval '1 day' FROM numbers)
INSERT INTO {schema}.journal (job_id, run_no, failure_count, recorded_at, outcome, kind)
SELECT id, 1, 0, statement_timestamp(), 0, {kind} FROM numbers
"""

_PAUSED = """
INSERT INTO {schema}.journal (job_id, run_no, failure_count, recorded_at, outcome, kind)
SELECT {id}, n, 0, statement_timestamp(), 1, {kind} FROM generate_series(1, 10000) n
"""


@pytest.mark.conformance(243)
def test_finished_jobs_make_no_claim_dearer(schema: str, session: Session) -> None:
    """However many are retained; a few levels more in the index of the bodies are all that is seen of them.

    Case 162.
    """
    fill(session, schema, 4 * BATCH, KIND)
    bench = Bench(schema, session)
    before, _ = bench.cost()
    session.execute(
        sql.SQL(_FINISHED).format(
            schema=sql.Identifier(schema), count=sql.Literal(size(1_000_000)), kind=sql.Literal(KIND)
        )
    )
    after, jobs = bench.cost()
    assert jobs == BATCH
    assert after <= before + 3 * jobs


@pytest.mark.parametrize("status", JOBS_OF)
def test_unfinished_and_dead_jobs_are_listed_without_a_look_at_history(
    schema: str, session: Session, status: str
) -> None:
    """At most 20 buffers for each job of a page, however many finished ones there are beside it (case 167)."""
    fill(session, schema, 4 * BATCH, KIND)
    names = {"schema": sql.Identifier(schema), "count": sql.Literal(20_000), "kind": sql.Literal(KIND)}
    session.execute(sql.SQL(_FINISHED).format(**names))
    page = (*[None] * 8, 100)
    for _ in range(2):
        buffers, jobs = explained(session, Sql(schema)(JOBS_OF[status]), page)
        assert jobs == (100 if status == "pending" else 0)
        assert buffers <= 20 * (jobs or 5)
        session.execute(sql.SQL("ANALYZE {schema}.jobs, {schema}.live").format(**names))


@pytest.mark.parametrize("since", ["9000-01-01", None], ids=["few", "many"])
def test_jobs_that_finished_in_a_span_are_listed_without_a_look_at_all_history(
    schema: str, session: Session, since: str | None
) -> None:
    """Few are looked up one by one, and of many the newest make a page; neither reads every job (case 167)."""
    names = {"schema": sql.Identifier(schema), "count": sql.Literal(50_000), "kind": sql.Literal(KIND)}
    session.execute(sql.SQL(_FINISHED).format(**names))
    page = (*[None] * 6, since, since, *[None] * 2, 100)
    for _ in range(2):
        buffers, jobs = explained(session, Sql(schema)(JOBS_BETWEEN), (since, None, *page, *page))
        assert jobs == (0 if since else 100)
        assert buffers <= (50 if since else 12_000)
        session.execute(sql.SQL("ANALYZE {schema}.jobs, {schema}.live, {schema}.journal").format(**names))


@pytest.mark.conformance(218)
def test_a_cleanup_costs_the_same_however_much_is_retained(schema: str, session: Session) -> None:
    """At most 25 buffers for each job that it deletes, with statistics and without (case 160)."""
    names = {"schema": sql.Identifier(schema), "count": sql.Literal(10_000), "kind": sql.Literal(KIND)}
    fill(session, schema, 4 * BATCH, KIND)
    session.execute(sql.SQL(_FINISHED).format(**names))
    long_ago, far_off = ([0, 3, 7], "2000-01-01", None, None, 1000), ([0, 3, 7], "9000-01-01", None, None, 1000)
    for _ in range(2):
        with session.transaction(force_rollback=True):
            assert explained(session, Sql(schema)(CLEANUP), far_off)[0] <= 25 * 1000
        assert explained(session, Sql(schema)(CLEANUP), long_ago)[0] <= 25
        session.execute(sql.SQL("ANALYZE {schema}.jobs, {schema}.journal, {schema}.live").format(**names))


@pytest.mark.conformance(243)
def test_a_job_that_paused_ten_thousand_times_costs_what_a_new_one_costs(schema: str, session: Session) -> None:
    """Its claim and its settle read nothing of its history."""
    fill(session, schema, 1, KIND)
    bench = Bench(schema, session, slots=1)
    new = [bench.cost()]
    row = session.execute(sql.SQL("SELECT id FROM {}.live").format(sql.Identifier(schema))).fetchone()
    assert row is not None
    session.execute(
        sql.SQL(_PAUSED).format(schema=sql.Identifier(schema), id=sql.Literal(row[0]), kind=sql.Literal(KIND))
    )
    session.execute(sql.SQL("UPDATE {}.live SET run_count = 10000").format(sql.Identifier(schema)))
    old = [bench.cost()]
    assert [jobs for _, jobs in new + old] == [1, 1]
    assert old[0][0] <= new[0][0] + 3
    started = time.monotonic()
    assert bench.claim() == 1
    assert time.monotonic() - started < 0.5
