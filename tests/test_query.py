"""What operators can look at: single jobs, pages of jobs, and the published views."""

from __future__ import annotations

import collections.abc as cabc
import datetime as dt
import time
import typing as t
import uuid
from zoneinfo import ZoneInfo

import attrs
import psycopg
import pytest
from fixtures.sqltext import on
from fixtures.work import ended, working
from psycopg.conninfo import make_conninfo

import venturi

Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[t.Any]]

HOUR = dt.timedelta(hours=1)
DEEP = "[" * 2000 + "]" * 2000
LONG = "1" + "0" * 5000


@pytest.fixture
def schema(emptied: str) -> str:
    """All tests here are content with one schema, emptied in between."""
    return emptied


@venturi.task("alpha", carry=dict[str, int])
class Alpha:
    number: int = 0
    key: str | None = None

    def dedup_key(self) -> str | None:
        return self.key


@venturi.task("beta", priority=venturi.Priority.LOW)
class Beta:
    number: int = 0


@pytest.fixture
def history(queue: venturi.Queue) -> dict[str, uuid.UUID]:
    """One job of each status, by its status; claimed by hand, as no worker is to be running."""

    @queue.handler
    def alpha(task: Alpha) -> venturi.Outcome:
        return venturi.Completed("done") if task.number == 0 else None

    @queue.handler
    def beta(task: Beta) -> None:
        raise venturi.PermanentError("never")

    with working(queue):
        jobs = {"completed": queue.enqueue(Alpha()).id}
        ended(queue, jobs["completed"])
        jobs["dead"] = queue.enqueue(Beta()).id  # alone, since what is settled together ends at the same instant
        ended(queue, jobs["dead"], "dead")
    jobs["cancelled"] = queue.enqueue(Beta(3)).id
    queue.cancel(jobs["cancelled"])
    jobs["pending"] = queue.enqueue(Alpha(7, key="k"), delay=HOUR, priority=venturi.Priority.HIGH).id
    jobs["claimed"] = queue.enqueue(Beta(5)).id
    return jobs


@pytest.fixture
def owner(queue: venturi.Queue, history: dict[str, uuid.UUID], connect: Connect) -> uuid.UUID:
    """The worker that holds the claimed job."""
    owner = uuid.uuid4()
    with connect(autocommit=True) as connection:
        connection.execute(
            on(
                queue.schema,
                """UPDATE {schema}.live SET owner = %s, run_count = 1, lease_until = now() + interval '1 h'
                    WHERE id = %s""",
            ),
            [owner, history["claimed"]],
        )
    return owner


def job(queue: venturi.Queue, id: uuid.UUID) -> venturi.Job:
    found = queue.job(id)
    assert found is not None
    return found


@pytest.mark.conformance(209)
def test_a_job_is_a_frozen_record_of_everything(
    queue: venturi.Queue, history: dict[str, uuid.UUID], owner: uuid.UUID
) -> None:
    """Every status has its own fields; all times are aware, in UTC; an unknown id gives None."""
    pending, claimed, completed = (job(queue, history[name]) for name in ("pending", "claimed", "completed"))
    assert {name: job(queue, id_).status for name, id_ in history.items()} == {name: name for name in history}
    assert (pending.kind, pending.payload, pending.priority, pending.dedup_key) == (
        "alpha", {"number": 7, "key": "k"}, venturi.Priority.HIGH, "k"
    )  # fmt: skip
    assert isinstance(pending.priority, venturi.Priority)
    assert (pending.run_count, pending.failure_count, pending.carry, pending.owner) == (0, 0, None, None)
    assert pending.visible_at is not None
    assert abs(pending.visible_at - pending.created_at - HOUR) < dt.timedelta(seconds=1)
    assert (claimed.owner, claimed.run_count, claimed.finished_at) == (owner, 1, None)
    assert claimed.lease_until is not None
    assert claimed.lease_until.utcoffset() == completed.created_at.utcoffset() == dt.timedelta(0)
    assert completed.finished_at is not None
    assert completed.finished_at >= completed.created_at
    assert completed.visible_at is None
    assert job(queue, history["dead"]).failure_count == 1
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        pending.kind = "x"  # type: ignore[misc]
    assert queue.job(uuid.uuid4()) is None


@pytest.mark.conformance(209)
@pytest.mark.parametrize(
    ("stored", "shown"),
    [
        ('"text"', "text"),
        ("[1, 2]", [1, 2]),
        ("null", None),
        ('{"number": "7"}', {"number": "7"}),
        (DEEP, DEEP),
        (LONG, LONG),
    ],
    ids=["text", "list", "null", "wrong field", "too deep", "too long a number"],
)
def test_a_payload_that_no_task_class_can_read_is_shown_as_it_is(
    queue: venturi.Queue, connect: Connect, stored: str, shown: object
) -> None:
    """A record never fails because of what is in its payload, nor does a list with such a record in it.

    Cases 004, 011.
    """
    id_ = queue.enqueue(Alpha()).id
    with connect(autocommit=True) as connection:
        connection.execute(on(queue.schema, "UPDATE {schema}.jobs SET payload = %s::jsonb"), [stored])
    found = job(queue, id_)
    assert [found] == queue.jobs()
    assert (found.kind, found.payload) == ("alpha", shown)


@pytest.mark.conformance(210)
def test_jobs_are_listed_newest_first_and_filtered(
    queue: venturi.Queue, history: dict[str, uuid.UUID], owner: uuid.UUID
) -> None:
    """Kind and status each leave only their own, both together only what fits both; the limit caps."""
    newest_first = list(reversed(history.values()))
    assert [found.id for found in queue.jobs()] == newest_first == sorted(history.values(), reverse=True)
    assert [found.id for found in queue.jobs(limit=2)] == newest_first[:2]
    assert {found.id for found in queue.jobs(kind="alpha")} == {history["completed"], history["pending"]}
    for status, id_ in history.items():
        assert [found.id for found in queue.jobs(status=t.cast(t.Any, status))] == [id_]
    assert [found.id for found in queue.jobs(kind="alpha", status="pending")] == [history["pending"]]
    assert queue.jobs(kind="gamma") == queue.jobs(kind="alpha", status="dead") == []


@pytest.mark.conformance(210)
@pytest.mark.parametrize(
    "options", [{"limit": 0}, {"limit": 1001}, {"status": "running"}, {"limit": True}, {"status": ""}]
)
def test_an_option_out_of_its_bounds_is_refused(queue: venturi.Queue, options: dict[str, t.Any]) -> None:
    """The message names the option."""
    with pytest.raises(venturi.ConfigError, match=next(iter(options))):
        queue.jobs(**options)


@pytest.mark.conformance(211)
def test_pages_give_every_job_once_and_in_order(queue: venturi.Queue) -> None:
    """Ten jobs by three: four pages, then an empty one; with a filter the pages hold what the filter leaves.

    Case 167.
    """
    receipts = queue.enqueue_many([Alpha(n) if n % 2 else Beta(n) for n in range(10)])
    expected = [receipt.id for receipt in reversed(receipts)]
    assert _paged(queue) == ([3, 3, 3, 1, 0], expected)
    sizes, evens = _paged(queue, kind="beta", status="pending")
    assert sizes == [3, 2, 0]
    assert evens == [id_ for id_ in expected if job(queue, id_).kind == "beta"]
    assert queue.jobs(before=expected[-1]) == []


def _paged(queue: venturi.Queue, **filters: t.Any) -> tuple[list[int], list[uuid.UUID]]:
    sizes, ids = list[int](), list[uuid.UUID]()
    while not sizes or sizes[-1]:
        page = queue.jobs(limit=3, before=ids[-1] if ids else None, **filters)
        sizes.append(len(page))
        ids += [found.id for found in page]
    return sizes, ids


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Kathmandu", "UTC"])
def test_sessions_of_any_zone_agree_on_every_instant(
    queue: venturi.Queue, schema: str, dsn: str, connect: Connect, monkeypatch: pytest.MonkeyPatch, zone: str
) -> None:
    """Producers, workers and operators wherever they are read and write the same times, all in UTC (case 088)."""
    monkeypatch.setenv("PGTZ", "Asia/Tokyo")
    monkeypatch.setenv("TZ", "Pacific/Kiritimati")
    time.tzset()
    try:
        caller = connect()
        caller.execute("SELECT set_config('timezone', %s, false)", [zone])
        at = dt.datetime(2100, 3, 28, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"))
        later = queue.enqueue(Beta(), conn=caller, at=at).id
        delayed = queue.enqueue(Beta(), conn=caller, delay=HOUR).id
        now = queue.enqueue(Alpha(), conn=caller).id
        caller.commit()
        elsewhere: venturi.Queue = venturi.Queue(schema, dsn=make_conninfo(dsn, options=f"-c timezone={zone}"))
        elsewhere.handler(task=Alpha)(lambda task: None)
        with working(elsewhere):
            ended(elsewhere, now)
        jobs = {id_: job(queue, id_) for id_ in (later, delayed, now)}
        for id_, found in jobs.items():
            assert elsewhere.job(id_) == queue.job(id_, conn=caller) == found
            assert {found.created_at.utcoffset()} == {dt.timedelta(0)}
        assert jobs[later].visible_at == at.astimezone(dt.UTC)
        assert jobs[delayed].visible_at == jobs[delayed].created_at + HOUR
        finished = jobs[now].finished_at
        assert finished is not None
        assert dt.timedelta(0) < finished - jobs[now].created_at < dt.timedelta(seconds=10)
        (entry,) = queue.journal(now, conn=caller)
        assert entry.recorded_at == finished
        assert elsewhere.cleanup(finished_before=finished) == 0
        assert elsewhere.cleanup(finished_before=finished + dt.timedelta(microseconds=1)) == 1
        elsewhere.close()
    finally:
        monkeypatch.delenv("TZ")
        time.tzset()


def test_pages_neither_skip_nor_repeat_while_jobs_come_and_go(queue: venturi.Queue, connect: Connect) -> None:
    """However many share an instant: what is there from the first page to the last is listed once (case 167)."""
    ids = [receipt.id for receipt in queue.enqueue_many([Beta(n) for n in range(30)])]
    with connect(autocommit=True) as connection:
        connection.execute(on(queue.schema, "UPDATE {schema}.jobs SET created_at = now()"))
    listed, gone = list[uuid.UUID](), set[uuid.UUID]()
    while page := queue.jobs(limit=4, before=listed[-1] if listed else None):
        listed += [found.id for found in page]
        queue.enqueue(Beta())
        for id_ in (listed[-1], next((id_ for id_ in ids if id_ not in listed and id_ not in gone), listed[0])):
            gone.add(id_)
            queue.cancel(id_)
        queue.cleanup(finished_before=dt.datetime.now(dt.UTC) + HOUR)
    assert listed == sorted(listed, reverse=True)
    assert len(listed) == len(set(listed))
    assert {*ids} - gone <= {*listed} <= {*ids}


def test_no_plan_is_kept_on_a_connection_that_looks_for_jobs(queue: venturi.Queue, connect: Connect) -> None:
    """One from a nearly empty table would read all of it later, when the same connection asks again."""
    caller = connect()
    job = queue.enqueue(Beta()).id
    for _ in range(7):
        queue.job(job, conn=caller)
        queue.jobs(conn=caller)
        queue.jobs(status="pending", conn=caller)
        queue.journal(job, conn=caller)
        queue.cancel(uuid.uuid4(), conn=caller)
        queue.requeue(job, conn=caller)
        queue.requeue_many(conn=caller)
    prepared = caller.execute("SELECT statement FROM pg_prepared_statements WHERE statement LIKE %s", ["%jobs%"])
    assert prepared.fetchall() == []


@pytest.mark.conformance(212)
def test_finished_since_is_inclusive_and_finished_until_is_not(
    queue: venturi.Queue, history: dict[str, uuid.UUID]
) -> None:
    """Both take the very instant of an end as a bound, and both leave out what is not finished."""
    instants = sorted((job(queue, history[s]).finished_at, history[s]) for s in ("completed", "dead", "cancelled"))
    middle, middle_id = instants[1]
    assert middle is not None
    assert {found.id for found in queue.jobs(finished_since=middle)} == {instants[1][1], instants[2][1]}
    assert {found.id for found in queue.jobs(finished_until=middle)} == {instants[0][1]}
    tick = dt.timedelta(microseconds=1)
    assert [found.id for found in queue.jobs(finished_since=middle, finished_until=middle + tick)] == [middle_id]
    abroad = middle.astimezone(dt.timezone(dt.timedelta(hours=5, minutes=45)))
    assert queue.jobs(finished_since=abroad) == queue.jobs(finished_since=middle)
    beginning = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)
    assert {found.id for found in queue.jobs(finished_since=beginning)} == {id_ for _, id_ in instants}


@pytest.mark.conformance(212)
@pytest.mark.parametrize("option", ["finished_since", "finished_until"])
def test_a_naive_datetime_is_refused(queue: venturi.Queue, option: str) -> None:
    """It would mean another instant on another machine (case 089)."""
    with pytest.raises(venturi.ConfigError, match=option):
        queue.jobs(**t.cast(t.Any, {option: dt.datetime(2030, 1, 1)}))


@pytest.mark.conformance(229)
def test_the_views_show_every_job_by_selects_alone(
    queue: venturi.Queue, history: dict[str, uuid.UUID], owner: uuid.UUID, connect: Connect
) -> None:
    """A role that may read the views and nothing else sees every job and every entry."""
    reader = f"reader_{uuid.uuid4().hex[:8]}"
    with connect(autocommit=True) as connection:
        connection.execute(on(queue.schema, "CREATE ROLE {reader}", reader=reader))
        try:
            connection.execute(on(queue.schema, "GRANT USAGE ON SCHEMA {schema} TO {reader}", reader=reader))
            for view in ("all_jobs", "all_entries", "all_workers"):
                connection.execute(
                    on(queue.schema, "GRANT SELECT ON {schema}.{view} TO {reader}", reader=reader, view=view)
                )
            connection.execute(on(queue.schema, "SET ROLE {reader}", reader=reader))
            rows = connection.execute(on(queue.schema, "SELECT status, id FROM {schema}.all_jobs")).fetchall()
            assert dict(rows) == history
            entries = connection.execute(
                on(queue.schema, "SELECT job_id, outcome FROM {schema}.all_entries")
            ).fetchall()
            assert set(entries) == {(history[status], status) for status in ("completed", "dead", "cancelled")}
            connection.execute(on(queue.schema, "SELECT * FROM {schema}.all_workers"))
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(on(queue.schema, "SELECT * FROM {schema}.live"))
        finally:
            connection.execute("RESET ROLE")
            connection.execute(on(queue.schema, "DROP OWNED BY {reader}", reader=reader))
            connection.execute(on(queue.schema, "DROP ROLE {reader}", reader=reader))


@pytest.mark.conformance(229)
def test_every_view_and_every_column_of_one_is_documented(schema: str, connect: Connect) -> None:
    """The database itself says what each of them means."""
    query = """
        SELECT c.relname, a.attname, col_description(c.oid, a.attnum), obj_description(c.oid, 'pg_class')
          FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
         WHERE c.relkind = 'v' AND c.relnamespace = to_regnamespace(quote_ident(%s))"""
    with connect(autocommit=True) as connection:
        columns = connection.execute(query, [schema]).fetchall()
    assert {view for view, *_ in columns} >= {"all_jobs", "all_entries", "all_workers"}
    assert [(view, column) for view, column, about, of_view in columns if not about or not of_view] == []
