"""The default queue, and where connection settings come from."""

from __future__ import annotations

import collections.abc as cabc
import typing as t

import psycopg
import pytest
from fixtures.program import Programs
from fixtures.sqltext import on
from psycopg import conninfo

import venturi
from venturi.store import migrate

Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[t.Any]]

NOWHERE = "host=127.0.0.1 port=1 connect_timeout=2"
SOURCES = ("dsn", "VENTURI_DATABASE_URL", "DATABASE_URL", "PG*")


@venturi.task("shared")
class Shared:
    pass


@pytest.fixture
def environment(dsn: str, monkeypatch: pytest.MonkeyPatch) -> cabc.Callable[[str, str], None]:
    """Sets the connection settings of one source."""
    for name in ("VENTURI_DATABASE_URL", "DATABASE_URL", "PGHOST", "PGPORT", "PGUSER", "PGDATABASE", "PGPASSWORD"):
        monkeypatch.delenv(name, raising=False)

    def set_source(source: str, value: str) -> None:
        if source == "PG*":
            parameters = conninfo.conninfo_to_dict(value)
            for key, name in (("host", "PGHOST"), ("port", "PGPORT"), ("user", "PGUSER"), ("dbname", "PGDATABASE")):
                if parameters.get(key) is not None:
                    monkeypatch.setenv(name, str(parameters[key]))
        else:
            monkeypatch.setenv(source, value)

    return set_source


@pytest.mark.conformance(244)
@pytest.mark.parametrize("source", SOURCES)
def test_the_first_source_that_is_set_is_used_alone(
    schema: str, dsn: str, environment: cabc.Callable[[str, str], None], source: str
) -> None:
    """Whatever the later ones say, even where they lead nowhere."""
    for later in SOURCES[SOURCES.index(source) + 1 :]:
        environment(later, NOWHERE)
    if source != "dsn":
        environment(source, dsn)
    queue = venturi.Queue(schema, dsn=dsn if source == "dsn" else None)
    queue.enqueue(Shared())
    assert queue.stats().kinds["shared"].ready == 1
    queue.close()


@pytest.mark.conformance(244)
@pytest.mark.parametrize("source", SOURCES[:3])
def test_a_source_that_leads_nowhere_is_not_passed_over(
    schema: str, dsn: str, environment: cabc.Callable[[str, str], None], source: str
) -> None:
    """A wrong setting is an error, not a reason to take another database."""
    for later in SOURCES[SOURCES.index(source) + 1 :]:
        environment(later, dsn)
    if source != "dsn":
        environment(source, "this is no connection string")
    queue = venturi.Queue(schema, dsn="this is no connection string" if source == "dsn" else None)
    with pytest.raises(venturi.ConfigError, match=source):
        queue.stats()
    queue.close()


@pytest.mark.conformance(244)
def test_settings_are_read_at_the_first_use(
    schema: str, dsn: str, environment: cabc.Callable[[str, str], None]
) -> None:
    """A queue may be made before the program has set its environment."""
    queue = venturi.Queue(schema)
    environment("DATABASE_URL", dsn)
    assert queue.stats().kinds == {}
    queue.close()


@pytest.mark.conformance(246)
def test_the_module_s_verbs_are_those_of_the_default_queue(dsn: str, program: Programs, connect: Connect) -> None:
    """venturi.handler, enqueue and work use the schema venturi and the environment's settings."""
    verbs = ("enqueue", "enqueue_many", "handler", "work", "job", "journal", "stats", "cancel", "requeue")
    for verb in verbs:
        assert getattr(venturi, verb) == getattr(venturi.default, verb)
    assert venturi.default.schema == "venturi"
    migrate.migrate(dsn, "venturi")
    try:
        script = program(
            """
            os.environ["VENTURI_DATABASE_URL"] = sys.argv[1]

            @venturi.task("hello")
            class Hello:
                pass

            @venturi.handler
            def hello(task: Hello) -> None:
                worker.stop()

            worker = venturi.work(block=False)
            job = venturi.enqueue(Hello()).id
            worker.join()
            say("status", venturi.job(job).status)
            venturi.default.close()
            """
        )
        assert script.hears("status") == "completed"
        assert script.ends() == 0
        with connect() as connection:
            rows = connection.execute("SELECT kind, status FROM venturi.all_jobs").fetchall()
        assert rows == [("hello", "completed")]
    finally:
        with connect(autocommit=True) as connection:
            connection.execute("DROP SCHEMA venturi CASCADE")


@pytest.mark.conformance(246)
def test_one_task_class_may_be_enqueued_on_several_queues(queue: venturi.Queue, dsn: str, connect: Connect) -> None:
    """Each keeps its own jobs and its own handler."""
    name = f"{queue.schema}_too"
    migrate.migrate(dsn, name)
    other = venturi.Queue(name, dsn=dsn)
    try:
        job = queue.enqueue(Shared()).id
        other.enqueue_many([Shared(), Shared()])
        assert [each.stats().kinds["shared"].ready for each in (queue, other)] == [1, 2]
        assert other.job(job) is None
        queue.handler(_handle)
        other.handler(_handle)
    finally:
        other.close()
        with connect(autocommit=True) as connection:
            connection.execute(on(name, "DROP SCHEMA {schema} CASCADE"))


def _handle(task: Shared) -> None:
    pass
