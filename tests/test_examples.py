"""Every example runs, twice over, against a real server, and says what it is there to show."""

from __future__ import annotations

import collections.abc as cabc
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import typing as t
import urllib.request
from pathlib import Path

import psycopg
import pytest
from fixtures.waiting import eventually
from psycopg import sql

import venturi

EXAMPLES = Path(__file__).parent.parent / "examples"

Start: t.TypeAlias = cabc.Callable[..., "subprocess.Popen[str]"]

SHOWN = {
    "quickstart": ["enqueued: inserted", "welcome, user 7 (en)", "settled: 1"],
    "transactional_enqueue": [
        "rolled back: order 1: out of stock",
        "jobs after the rollback: 0",
        "ready in here: 1 - outside: 0",
        "confirmed: order 2",
    ],
    "checkpoint": [
        "run 1: page 0 of people.csv: ada, grace",
        "run 3: page 1 of people.csv: barbara, frances",
        "run 4: page 2 of people.csv: radia",
        "journal: run 1 paused: next page",
        "journal: run 2 retried: RetryLater: the source was busy",
        "journal: run 3 paused: next page",
        "journal: run 4 completed: 5 names",
    ],
    "merge": [
        "saves: inserted replaced replaced",
        "mails: inserted combined",
        "indexed document 7, version 3",
        "mailed ada: hello, news",
    ],
    "flask_app": ["working: ", "nobody: 500", "ada: 202", "welcome sent"],
    "gunicorn_conf": [],
}


@pytest.fixture
def environment(dsn: str) -> cabc.Iterator[dict[str, str]]:
    """What the examples find in their environment; the schemas that they make are dropped after the test."""
    home = str(Path(venturi.__file__).parent.parent)
    yield {**os.environ, "PYTHONPATH": home, "VENTURI_DATABASE_URL": dsn}
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SET client_min_messages = warning")
        found = connection.execute("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'example%'").fetchall()
        for (name,) in found:
            connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(name)))


@pytest.fixture
def start(environment: dict[str, str]) -> cabc.Iterator[Start]:
    """Starts programs in the folder of the examples; those that still run after the test are killed."""
    with contextlib.ExitStack() as started:

        def start(*command: str) -> subprocess.Popen[str]:
            program = subprocess.Popen(
                [sys.executable, *command],
                cwd=EXAMPLES,
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            started.enter_context(program)
            started.callback(program.kill)
            return program

        yield start


def test_every_example_is_run() -> None:
    """No example is left out here; those that are tests themselves are run by tests/test_testing.py."""
    assert {path.stem for path in EXAMPLES.glob("*.py") if not path.match("test_*")} == set(SHOWN)


@pytest.mark.parametrize("name", SHOWN)
def test_an_example_ends_by_itself_and_shows_what_it_says(name: str, start: Start) -> None:
    """Run as a script it prints its lines in order and ends, also when it has been run before."""
    for _ in range(2):
        program = start(f"{name}.py")
        printed, _ = program.communicate(timeout=30)
        assert program.returncode == 0, printed
        rest = printed
        for line in SHOWN[name]:
            assert line in rest, printed
            rest = rest.partition(line)[2]


@pytest.mark.parametrize("name", SHOWN)
def test_an_example_imports_the_package_alone(name: str) -> None:
    """What a user needs is reached by `import venturi`, and an example is short enough to be read at once."""
    source = (EXAMPLES / f"{name}.py").read_text()
    assert "\nimport venturi\n" in source
    assert not re.search(r"venturi\.(store|worker|queue|registry|values)\b|from venturi", source)
    assert len(source.splitlines()) <= 70


def get(url: str, *, data: bytes | None = None) -> dict[str, str]:
    with urllib.request.urlopen(url, data=data, timeout=10) as answer:
        decoded: dict[str, str] = json.load(answer)
        return decoded


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def test_flask_s_own_server_stops_without_leaving_a_claim(
    start: Start, connect: cabc.Callable[..., psycopg.Connection], tmp_path: Path
) -> None:
    """The example in earnest, with app.run(), ended by SIGTERM: what runs then is completed before the process ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    source, _, rest = (EXAMPLES / "flask_app.py").read_text().partition("        client = app.test_client()")
    assert "app.run()" in rest
    program = source.replace("time.sleep(0.05)", "time.sleep(1)") + f"        app.run(port={port})\n"
    (tmp_path / "serve.py").write_text(program)
    server = start(str(tmp_path / "serve.py"))
    eventually(lambda: listens(port), 20, what="the server listens")
    get(f"http://127.0.0.1:{port}/users/ada", data=b"")
    connection = connect(autocommit=True)
    query = "SELECT status FROM example_flask.all_jobs ORDER BY created_at DESC LIMIT 1"
    eventually(lambda: connection.execute(query).fetchone() == ("claimed",), what="the handler runs")
    server.send_signal(signal.SIGTERM)
    printed, _ = server.communicate(timeout=30)
    assert server.returncode == 0, printed
    assert connection.execute(query).fetchone() == ("completed",)


def test_gunicorn_stops_without_leaving_a_claim(start: Start, connect: cabc.Callable[..., psycopg.Connection]) -> None:
    """Each process works beside its requests, and gives its jobs back or finishes them before it ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    server = start("-m", "gunicorn", "--bind", address, "--config", "gunicorn_conf.py", "flask_app:app")
    eventually(lambda: listens(port), 20, what="the server listens")
    first = get(f"http://{address}/users/ada", data=b"")["job"]
    eventually(lambda: get(f"http://{address}/jobs/{first}")["status"] == "completed", what="the job is done")

    connection = connect(autocommit=True)
    living = "SELECT count(DISTINCT pid), count(*) FROM example_flask.all_workers WHERE live"
    eventually(lambda: connection.execute(living).fetchone() == (2, 2), what="each process has one worker")

    claimed = "SELECT 1 FROM example_flask.all_jobs WHERE status = 'claimed'"
    eventually(
        lambda: get(f"http://{address}/users/bob", data=b"") and connection.execute(claimed).fetchone(),
        what="a handler runs",
    )
    server.send_signal(signal.SIGTERM)
    printed, _ = server.communicate(timeout=30)
    assert server.returncode == 0, printed
    assert printed.count("released=(), unsettled=()") == 2, printed
    states = connection.execute("SELECT DISTINCT status FROM example_flask.all_jobs").fetchall()
    assert {("completed",)} <= set(states) <= {("completed",), ("pending",)}
    assert connection.execute("SELECT count(*) FROM example_flask.all_workers").fetchone() == (0,)
