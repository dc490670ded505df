"""The README says what is true: each of its snippets runs, and its list of privileges is enough."""

from __future__ import annotations

import collections.abc as cabc
import datetime as dt
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import typing as t
import uuid
from pathlib import Path

import attrs
import psycopg
import pytest
from fixtures.waiting import eventually
from psycopg import conninfo

import venturi

README = Path(__file__).parent.parent / "README.md"
ROLES = ("app_producer", "app_worker", "app_operator", "app_viewer")

HANDLERS = """
import venturi

@venturi.task("readme.cli")
class Task: ...

@venturi.handler
def handle(task: Task) -> None: ...
"""

TESTS = """
test_the_first_page_pauses()
with psycopg.connect(DATABASE) as conn:
    test_signing_up(conn)
    conn.rollback()
"""

Connect: t.TypeAlias = cabc.Callable[..., "psycopg.Connection[t.Any]"]


@attrs.frozen
class Block:
    """A fenced block: its language, the line of its first line, and its text."""

    language: str
    line: int
    text: str


def blocks(*languages: str) -> list[Block]:
    """The blocks in these languages, in order; all of them when none is named."""
    source = README.read_text()
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", source, re.MULTILINE | re.DOTALL)
    every = [Block(each[1], source.count("\n", 0, each.start()) + 2, each[2]) for each in found]
    return [block for block in every if not languages or block.language in languages]


@pytest.fixture
def roles(connect: Connect) -> cabc.Iterator[psycopg.Connection[t.Any]]:
    """A superuser's connection, and the roles that the README speaks of."""
    connection = connect(autocommit=True)
    for role in ROLES:
        connection.execute(f"CREATE ROLE {role}".encode())
    yield connection
    for role in ROLES:
        connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())


@pytest.fixture
def database(dsn: str, connect: Connect, tmp_path: Path) -> cabc.Iterator[dict[str, str]]:
    """An environment with a database in which the README's default queue may do as it likes."""
    home = str(Path(venturi.__file__).parent.parent)
    yield {**os.environ, "PYTHONPATH": f"{home}{os.pathsep}{tmp_path}", "VENTURI_DATABASE_URL": dsn}
    with connect(autocommit=True) as connection:
        connection.execute("SET client_min_messages = warning")
        connection.execute("DROP SCHEMA IF EXISTS venturi CASCADE; DROP TABLE IF EXISTS users")


def run(environment: dict[str, str], *command: str | Path) -> str:
    """What a Python program prints that has to succeed."""
    result = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
    return result.stdout


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    """No snippet escapes the tests of this file."""
    assert {block.language for block in blocks()} == {"sh", "python", "sql", "console"}


def test_there_are_two_command_lines_to_copy() -> None:
    """Run it and Test it are one line each, and they come first."""
    first, second = (block.text.splitlines() for block in blocks("sh"))
    assert len(first) == len(second) == 1
    assert first[0].endswith(".venv/bin/venturi demo")
    assert second[0].endswith(".venv/bin/tox")
    assert [block.language for block in blocks()][:2] == ["sh", "sh"]


def test_links_lead_somewhere() -> None:
    """Every relative link names a file of the checkout."""
    targets = re.findall(r"\[[^\]]+\]\(([\w/.]+)\)", README.read_text())
    assert targets
    assert [target for target in targets if not (README.parent / target).exists()] == []


def test_the_python_and_sql_of_the_readme_run_in_order(
    database: dict[str, str], roles: psycopg.Connection[t.Any], tmp_path: Path
) -> None:
    """One reader types them all into one program, and then the SQL into psql."""
    lines = [""] * len(README.read_text().splitlines())
    lines[0] = "import os; DATABASE = os.environ['VENTURI_DATABASE_URL']"
    for block in blocks("python"):
        # At its own line, so that a traceback names the line of the README.
        text = block.text.splitlines()
        lines[block.line - 1 : block.line - 1 + len(text)] = text
    program = tmp_path / "readme.py"
    program.write_text("\n".join([*lines, TESTS]))
    printed = run(database, program)
    assert "welcome, user 7\n" in printed
    assert "inserted" in printed
    assert "welcome, user 70\n" in printed
    for block in blocks("sql"):
        roles.execute(block.text.encode())


def test_the_command_lines_of_the_readme_work(database: dict[str, str], connect: Connect, tmp_path: Path) -> None:
    """Each console line does what it says, with a job's id for ID."""
    (tmp_path / "myapp").mkdir()
    (tmp_path / "myapp" / "handlers.py").write_text(HANDLERS)
    connection = connect(autocommit=True)
    for line in [line for block in blocks("console") for line in block.text.splitlines()]:
        prompt, program, *words = shlex.split(line)
        assert (prompt, program) == ("$", "venturi")
        if words[0] == "work":
            work_and_stop(database, connection, words)
            continue
        status = "dead" if words[0] in ("journal", "requeue") else "pending"
        arguments = [str(stored(connection, status)) if word == "ID" else word for word in words]
        printed = run(database, "-m", "venturi", *arguments)
        assert printed or words[0] == "migrate", line


def work_and_stop(environment: dict[str, str], connection: psycopg.Connection[t.Any], words: list[str]) -> None:
    """Start a worker as a process of its own, and end it as a supervisor would."""
    command = [sys.executable, "-m", "venturi", *words]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as worker:
        eventually(lambda: connection.execute("SELECT 1 FROM venturi.all_workers").fetchone(), 10, what="it works")
        worker.send_signal(signal.SIGTERM)
        printed, _ = worker.communicate(timeout=20)
    assert worker.returncode == 0, printed


def stored(connection: psycopg.Connection[t.Any], status: str) -> uuid.UUID:
    """A job of that status, written by hand."""
    number = uuid.uuid4()
    connection.execute(
        "INSERT INTO venturi.jobs (id, kind, payload, priority, created_at) VALUES (%s, 'readme.cli', '{}', 1, now())",
        (number,),
    )
    where = {
        "pending": "live (id, kind, priority, visible_at) VALUES (%s, 'readme.cli', 1, now())",
        "dead": "dead (id, kind, died_at, run_count, failure_count) VALUES (%s, 'readme.cli', now(), 1, 1)",
    }
    connection.execute(f"INSERT INTO venturi.{where[status]}".encode(), (number,))
    if status == "dead":
        connection.execute(
            "INSERT INTO venturi.journal (job_id, run_no, failure_count, recorded_at, outcome, kind)"
            " VALUES (%s, 1, 1, now(), 3, 'readme.cli')",
            (number,),
        )
    return number


# --- Privileges


@venturi.task("grant.plain")
class Plain:
    number: int


@venturi.task("grant.keyed", carry=int)
class Keyed:
    """Merges, pauses once, fails once, and waits to be cancelled or dies."""

    end: str

    def dedup_key(self) -> str:
        return self.end

    def merge(self, existing: venturi.Pending[Keyed, int]) -> venturi.Merge[Keyed]:
        return venturi.Replace() if len(existing.history) < 9 else venturi.Keep()


@pytest.fixture
def granted(
    schema: str, dsn: str, roles: psycopg.Connection[t.Any]
) -> cabc.Iterator[cabc.Callable[[str], venturi.Queue]]:
    """Gives a queue whose connections have the rights of one of the README's roles."""
    (grants,) = (block.text for block in blocks("sql") if "GRANT" in block.text)
    text = grants.replace("venturi.", f"{schema}.").replace("SCHEMA venturi", f"SCHEMA {schema}")
    roles.execute(text.encode())
    queues: list[venturi.Queue] = []

    def granted(role: str) -> venturi.Queue:
        queues.append(venturi.Queue(schema, dsn=conninfo.make_conninfo(dsn, options=f"-c role={role}")))
        return queues[-1]

    yield granted
    for queue in queues:
        queue.close()


def produce(queue: venturi.Queue) -> dict[str, uuid.UUID]:
    """Everything that a producer does; the ids of the keyed jobs."""
    queue.enqueue(Plain(1))
    queue.enqueue_many(Plain(n) for n in range(1200))
    queue.enqueue_many([Keyed("dies"), Plain(2), Keyed("dies")])
    ids = {end: queue.enqueue(Keyed(end)).id for end in ("dies", "waits", "stays")}
    assert queue.enqueue(Keyed("waits")).action == "replaced"
    return ids


def consume(queue: venturi.Queue, connection: psycopg.Connection[t.Any], during: cabc.Callable[[], None]) -> None:
    """Everything that a worker does, up to a recovery, until all jobs have come to their end."""
    running = threading.Event()

    @queue.handler
    def plain(task: Plain) -> None: ...

    @queue.handler
    def keyed(task: Keyed, ctx: venturi.Context[int]) -> venturi.Outcome:
        if task.end == "waits":
            running.set()
            assert ctx.cancelled.wait(10)
            ctx.cancelled.check()
        ctx.carry += 1
        if ctx.carry == 1:
            return venturi.Pause()
        if ctx.carry == 2:
            raise venturi.RetryLater(dt.timedelta(0))
        if not ctx.history:
            return None
        raise venturi.PermanentError("no more")

    lost = connection.execute(
        f"UPDATE {queue.schema}.live SET owner = gen_random_uuid(), lease_until = now() - interval '1 s', run_count = 1"
        f" WHERE id = (SELECT id FROM {queue.schema}.live WHERE kind = 'grant.plain' LIMIT 1) RETURNING id".encode()
    ).fetchone()
    assert lost is not None
    left = f"SELECT 1 FROM {queue.schema}.live WHERE id <> %s AND visible_at < now() + interval '1 hour'".encode()
    recovered = f"SELECT 1 FROM {queue.schema}.all_entries WHERE job_id = %s AND outcome = 'recovered'".encode()
    with queue.work(block=False, concurrency=4, lease=3):
        assert running.wait(10)
        during()
        eventually(lambda: connection.execute(recovered, lost).fetchone(), 10, what="the lost claim is recovered")
        eventually(lambda: not connection.execute(left, lost).fetchone(), 10, what="the other jobs are done")


def test_the_privileges_of_the_readme_suffice_for_each_role(
    granted: cabc.Callable[[str], venturi.Queue], roles: psycopg.Connection[t.Any]
) -> None:
    """Producer, worker, operator and viewer do all that is theirs with what is granted to them (case 150)."""
    operator, viewer = granted("app_operator"), granted("app_viewer")
    ids = produce(granted("app_producer"))

    def operate() -> None:
        assert operator.cancel(ids["waits"])

    later = f"UPDATE {viewer.schema}.live SET visible_at = now() + interval '1 day' WHERE dedup_key = 'stays'"
    roles.execute(later.encode())
    consume(granted("app_worker"), roles, operate)
    assert operator.cancel(ids["stays"])

    job = viewer.job(ids["dies"])
    assert job is not None
    assert job.status == "dead"
    assert viewer.jobs(status="cancelled")
    assert viewer.jobs(status="dead", kind="grant.keyed", limit=1) == [job]
    assert {job.status for job in viewer.jobs(status="pending")} <= {"pending"}
    assert viewer.jobs(status="claimed") == []
    assert [entry.outcome for entry in viewer.journal(ids["dies"])][-3:] == ["paused", "retried", "dead"]
    assert viewer.stats().kinds["grant.keyed"].dead == 1

    assert operator.requeue(ids["dies"])
    assert operator.cancel(ids["dies"])
    assert operator.cleanup(finished_before=dt.datetime.now(dt.UTC) + dt.timedelta(hours=1)) > 1200


@pytest.mark.parametrize("role", ["app_worker", "app_operator", "app_viewer"])
def test_only_producers_may_enqueue(role: str, granted: cabc.Callable[[str], venturi.Queue]) -> None:
    """The privileges of the other roles do not reach as far."""
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        granted(role).enqueue(Plain(1))
