"""What is logged, what is not, and what no record, error or repr ever holds."""

from __future__ import annotations

import collections.abc as cabc
import functools
import logging
import threading
import typing as t
import uuid

import psycopg
import pytest
from fixtures.program import Programs
from fixtures.proxy import Proxy
from fixtures.sqltext import on
from fixtures.waiting import eventually
from fixtures.work import ended, until, working
from psycopg import conninfo

import venturi

Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[t.Any]]

SECRET = "s3cret-of-the-user"
PASSWORD = "pa55word"


@pytest.fixture
def schema(emptied: str) -> str:
    """All tests here are content with one schema, emptied in between."""
    return emptied


@venturi.task("secret", carry=dict[str, str])
class Secret:
    end: str = "return"
    text: str = SECRET
    key: str | None = None

    def dedup_key(self) -> str | None:
        return self.key


class Heard(logging.Handler):
    """Keeps every record that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def records() -> cabc.Iterator[list[logging.LogRecord]]:
    """Everything that venturi logs, at every level."""
    heard, logger = Heard(), logging.getLogger("venturi")
    logger.addHandler(heard)
    logger.setLevel(logging.DEBUG)
    yield heard.records
    logger.removeHandler(heard)
    logger.setLevel(logging.NOTSET)


@pytest.fixture
def secretive(schema: str, dsn: str) -> cabc.Iterator[venturi.Queue]:
    """A queue whose connection string holds a password and whose handlers have secrets."""
    queue = venturi.Queue(schema, dsn=conninfo.make_conninfo(dsn, password=PASSWORD))

    @queue.handler
    def handle(task: Secret, ctx: venturi.Context[dict[str, str]]) -> venturi.Outcome:
        ctx.carry["kept"] = SECRET
        match task.end:
            case "fail":
                raise RuntimeError("retry me")
            case "die":
                raise venturi.PermanentError("no hope")
            case "pause":
                return venturi.Completed() if ctx.run_count > 1 else venturi.Pause()
            case _:
                return None

    yield queue
    queue.close()


def about(records: list[logging.LogRecord], id: uuid.UUID, word: str) -> list[logging.LogRecord]:
    return [r for r in records if str(id) in r.getMessage() and word in r.getMessage()]


@pytest.mark.conformance(224)
@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("return", ["claimed", "completed"]),
        ("pause", ["claimed", "paused"]),
        ("fail", ["claimed", "retried"]),
        ("die", ["claimed", "dead"]),
    ],
)
def test_claims_and_settles_are_logged_with_job_kind_run_and_worker(
    secretive: venturi.Queue, records: list[logging.LogRecord], end: str, words: list[str]
) -> None:
    """In the message, and as attributes of the record for those who log in JSON."""
    with working(secretive) as worker:
        job = secretive.enqueue(Secret(end)).id
        for word in words:
            record = eventually(functools.partial(about, records, job, word))[0]
            assert "secret" in record.getMessage()
            expected = {"job": str(job), "kind": "secret", "run": 1, "worker": str(worker.id)}
            assert {name: getattr(record, name) for name in expected} == expected
            assert record.module == "coordinator"


@pytest.mark.conformance(224)
def test_merges_are_logged_with_job_and_kind(secretive: venturi.Queue, records: list[logging.LogRecord]) -> None:
    """A merge is nobody's run, so that the run is the pending job's last and no worker is named."""
    job = secretive.enqueue(Secret(key="k")).id
    secretive.enqueue(Secret(key="k"))
    (record,) = about(records, job, "merged")
    assert (record.__dict__["job"], record.__dict__["kind"], record.__dict__["run"]) == (str(job), "secret", 0)


@pytest.mark.conformance(224)
def test_recoveries_and_releases_are_logged_with_job_kind_run_and_worker(
    queue: venturi.Queue, connect: Connect, records: list[logging.LogRecord]
) -> None:
    """A recovery names the worker that was lost, a release the one that gave up."""
    began, go = threading.Semaphore(0), threading.Event()

    @queue.handler
    def handle(task: Secret) -> None:
        began.release()
        go.wait(10)

    lost = uuid.uuid4()
    recovered = queue.enqueue(Secret()).id
    with connect(autocommit=True) as connection:
        connection.execute(
            on(
                queue.schema,
                """UPDATE {schema}.live SET owner = %s, run_count = 3, lease_until = now() - interval '1 s'""",
            ),
            [lost],
        )
    with queue.work(block=False, shutdown_timeout=0) as worker:
        until(queue, recovered, "recovered")
        released = queue.enqueue(Secret()).id
        assert began.acquire(timeout=5)
    go.set()
    for job, word, run, owner in ((recovered, "recovered", 3, lost), (released, "released", 1, worker.id)):
        record = about(records, job, word)[0]
        expected = {"job": str(job), "kind": "secret", "run": run, "worker": str(owner)}
        assert {name: getattr(record, name) for name in expected} == expected
    eventually(lambda: about(records, released, "is not recorded"))


@pytest.mark.conformance(224)
def test_nothing_that_is_logged_or_shown_holds_a_secret(
    secretive: venturi.Queue,
    schema: str,
    proxy: Proxy,
    records: list[logging.LogRecord],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not payload, carry, password or connection string: not in records, errors or reprs (case 168)."""
    monkeypatch.setattr("venturi.store.pool.POOL_SECONDS", 0.3)
    shown = list[object]()
    with working(secretive) as worker:
        jobs = [secretive.enqueue(Secret(end)).id for end in ("return", "fail", "die", "pause")]
        ended(secretive, jobs[0])
        ended(secretive, jobs[2], "dead")
        ended(secretive, jobs[3])
        until(secretive, jobs[1], "retried")
        shown += [worker, secretive, *map(secretive.job, jobs), secretive.stats(), secretive.store]
        shown += [entry for job in jobs for entry in secretive.journal(job)]
    cut = venturi.Queue(schema, dsn=conninfo.make_conninfo(proxy.dsn, password=PASSWORD))
    cut.handler(t.cast(t.Any, handler))
    with working(cut):
        proxy.refuse()
        proxy.cut()
        eventually(lambda: [r for r in records if "database trouble" in r.getMessage()])
        with pytest.raises(psycopg.OperationalError) as raised:
            cut.stats()
        shown.append(raised.value)
        proxy.resume()
    cut.close()
    with pytest.raises(venturi.ConfigError) as refused:
        venturi.Queue(dsn=f"host=x password={PASSWORD} nonsense").stats()
    shown += [refused.value, repr(refused.value)]
    formatter = logging.Formatter("%(message)s")
    texts = [formatter.format(record) + repr(vars(record)) for record in records if record.name.startswith("venturi")]
    texts += [repr(each) + str(each) for each in shown]
    assert len(texts) > 20
    assert [text for text in texts if SECRET in text or PASSWORD in text] == []


def handler(task: Secret) -> None:
    pass


UNREACHABLE = [
    f"postgresql://user:{PASSWORD}@127.0.0.1:1/x",
    f"host=127.0.0.1 port=1 user=user password='{PASSWORD} {PASSWORD}'",
    f"postgresql://user@127.0.0.1:1/x?password={PASSWORD}",
    f"postgresql://user:p@{PASSWORD}@127.0.0.1:1/x",
    f"postgresql://user:p@{PASSWORD}/x@127.0.0.1:1/x",
    f"postgresql://user:{PASSWORD}/x@127.0.0.1:1/x",
    f"postgresql://user:{PASSWORD}%zz@127.0.0.1:1/x",
]


@pytest.mark.parametrize("url", UNREACHABLE)
def test_a_pool_that_cannot_connect_tells_no_password(
    url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the logger of psycopg's pool nor the error says a part of one, well written or not (case 168)."""
    monkeypatch.setattr("venturi.store.pool.POOL_SECONDS", 0.2)
    caplog.set_level(logging.DEBUG)
    queue = venturi.Queue(dsn=url)
    with pytest.raises((psycopg.OperationalError, venturi.ConfigError)) as raised:
        queue.stats()
    queue.close()
    assert bool(caplog.records) is isinstance(raised.value, psycopg.Error)
    assert PASSWORD not in caplog.text + str(raised.value) + repr(raised.value)


def test_the_servers_detail_stays_out_of_logs_and_notes(
    queue: venturi.Queue, schema: str, connect: Connect, records: list[logging.LogRecord]
) -> None:
    """An error of the database is noted without the values of rows, which only its traceback has (case 168)."""
    connection = connect(autocommit=True)
    connection.execute(on(schema, "CREATE TABLE {schema}.unique_mail (mail text PRIMARY KEY)"))

    @queue.handler
    def handle(task: Secret) -> None:
        for _ in range(2):
            connection.execute(on(schema, "INSERT INTO {schema}.unique_mail VALUES (%s)"), [SECRET])

    with working(queue):
        (entry,) = until(queue, queue.enqueue(Secret()).id, "retried")
    connection.execute(on(schema, "DROP TABLE {schema}.unique_mail"))
    assert entry.note == 'UniqueViolation: duplicate key value violates unique constraint "unique_mail_pkey"'
    assert f"DETAIL:  Key (mail)=({SECRET})" in (entry.traceback or "")
    assert [record for record in records if SECRET in repr(vars(record))] == []
    assert SECRET not in repr(entry)


class Faulty(logging.Handler):
    """Raises at every record, which it counts."""

    seen = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.seen += 1
        raise RuntimeError("a faulty handler")


def test_log_handlers_that_raise_change_nothing(
    secretive: venturi.Queue, capfd: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """Jobs are merged, run, retried and given up as ever; what was raised goes to stderr (cases 125, 173)."""
    faulty, logger = Faulty(), logging.getLogger("venturi")
    logger.addHandler(faulty)
    request.addfinalizer(lambda: logger.removeHandler(faulty))
    logger.setLevel(logging.DEBUG)
    request.addfinalizer(lambda: logger.setLevel(logging.NOTSET))
    merged = secretive.enqueue(Secret(key="k")).id
    secretive.enqueue(Secret(key="k"))
    with working(secretive) as worker:
        failing, dying = (receipt.id for receipt in secretive.enqueue_many([Secret("fail"), Secret("die")]))
        ended(secretive, merged)
        until(secretive, failing, "retried")
        ended(secretive, dying, "dead")
        worker.stop()
        assert worker.join(5) == venturi.Report(3)
    assert faulty.seen > 6
    assert "a faulty handler" in capfd.readouterr().err


@pytest.mark.conformance(224)
def test_a_task_that_cannot_be_stored_is_not_quoted(secretive: venturi.Queue) -> None:
    """The error names the path (case 168)."""
    with pytest.raises(venturi.PayloadError) as error:
        secretive.enqueue(Secret(text=SECRET + "\ud800"))
    assert "text" in str(error.value)
    assert SECRET not in str(error.value) + repr(error.value)


@pytest.mark.conformance(225)
def test_a_thousand_good_jobs_log_nothing_at_warning(queue: venturi.Queue, records: list[logging.LogRecord]) -> None:
    """Nor is anything said that is not asked for, at the default level (case 173)."""
    done = threading.Semaphore(0)

    @queue.handler
    def handle(task: Secret) -> None:
        done.release()

    logging.getLogger("venturi").setLevel(logging.INFO)
    queue.enqueue_many([Secret() for _ in range(1000)])
    with working(queue, concurrency=8):
        for _ in range(1000):
            assert done.acquire(timeout=10)
    assert [record.getMessage() for record in records if record.name.startswith("venturi")] == []


@pytest.mark.conformance(225)
def test_the_library_sets_no_level_and_adds_no_handler(program: Programs) -> None:
    """Whatever it is used for, logging is the program's own business (case 173)."""
    script = program(
        """
        import logging

        ran = threading.Event()

        @venturi.task("job")
        class Job:
            pass

        @queue.handler
        def handle(task: Job) -> None:
            ran.set()

        with queue.work(block=False):
            queue.enqueue(Job())
            assert ran.wait(10)
        queue.migrate()
        loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith("venturi")]
        say("loggers", len(loggers) > 3, {each.level for each in loggers}, sum((each.handlers for each in loggers), []))
        say("root", logging.root.handlers, logging.root.level)
        queue.close()
        """
    )
    assert script.hears("loggers") == "True {0} []"
    assert script.hears("root") == "[] 30"
    assert script.ends() == 0
