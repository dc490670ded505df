"""The command line, in processes of its own where signals and exits matter."""

from __future__ import annotations

import collections.abc as cabc
import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import typing as t

import psycopg
import pytest
from fixtures.waiting import eventually
from psycopg import sql

import venturi
from venturi.cli import main

MODULE = """
import os, pathlib, time
import venturi

queue = venturi.Queue(os.environ["TEST_SCHEMA"])
empty = venturi.Queue(os.environ["TEST_SCHEMA"])
other = "no queue"

@venturi.task("cli.touch")
class Touch:
    path: str

@venturi.task("cli.hang")
class Hang:
    path: str

@queue.handler
def touch(task: Touch, ctx: venturi.Context) -> None:
    pathlib.Path(task.path).touch()
    ctx.cancelled.wait()

missing = venturi.Queue("nowhere")
missing.handler(touch)

@queue.handler
def hang(task: Hang) -> None:
    pathlib.Path(task.path).touch()
    while True:
        time.sleep(60)
"""


@venturi.task("cli.touch")
class Touch:
    path: str


@venturi.task("cli.hang")
class Hang:
    path: str


@venturi.task("cli.fail")
class Fail:
    why: str


class Ran(t.NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def run(schema: str, dsn: str, capsys: pytest.CaptureFixture[str]) -> cabc.Callable[..., Ran]:
    """Runs a command on the test's queue."""

    def run(command: str, *arguments: str) -> Ran:
        code = main([command, *arguments, "--dsn", dsn, "--schema", schema])
        written = capsys.readouterr()
        return Ran(code, written.out, written.err)

    return run


@pytest.fixture
def worker(schema: str, dsn: str, tmp_path: pathlib.Path) -> cabc.Iterator[cabc.Callable[..., subprocess.Popen[str]]]:
    """Starts ``venturi work`` in a folder with a module of handlers."""
    (tmp_path / "jobs.py").write_text(MODULE)
    environment = {
        **os.environ,
        "PYTHONPATH": str(pathlib.Path(venturi.__file__).parent.parent),
        "VENTURI_DATABASE_URL": dsn,
        "TEST_SCHEMA": schema,
    }
    with contextlib.ExitStack() as started:

        def start(*arguments: str) -> subprocess.Popen[str]:
            command = [sys.executable, "-m", "venturi", "work", *arguments]
            process = started.enter_context(
                subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
            )
            started.callback(process.kill)
            return process

        yield start


@pytest.fixture
def dead(queue: venturi.Queue) -> venturi.Job:
    """A job that has died of a terrible reason."""

    def fail(task: Fail) -> None:
        raise venturi.PermanentError(task.why)

    queue.handler(task=Fail)(fail)
    receipt = queue.enqueue(Fail("\x1b[31mterrible\nreason"))
    with queue.work(block=False, concurrency=1):
        eventually(lambda: queue.stats().kinds["cli.fail"].dead, what="the job is dead")
    job = queue.job(receipt.id)
    assert job is not None
    return job


def shut(process: subprocess.Popen[str], *numbers: signal.Signals) -> tuple[int, float]:
    """Send signals, and give the exit code and the seconds that the end took."""
    began = time.monotonic()
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.1)
    return process.wait(20), time.monotonic() - began


@pytest.mark.conformance(230, 250)
def test_migrate_applies_what_is_missing_and_then_nothing(dsn: str, schema: str, run: cabc.Callable[..., Ran]) -> None:
    """The first call names the migrations that it applies, the second one finds none."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(schema)))
    assert "missing" in run("migrate", "--status").out
    assert "applied 0001.queue\napplied 0002.cancelled\n" in run("migrate").out
    assert run("migrate") == (0, f"schema {schema!r} is up to date\n", "")
    assert "at version 2;" in run("migrate", "--status").out


@pytest.mark.conformance(235)
def test_the_printed_sql_leaves_migrate_nothing_to_do(dsn: str, schema: str, run: cabc.Callable[..., Ran]) -> None:
    """What --sql prints for a missing queue makes that queue; for one that is up to date it prints nothing."""
    assert run("migrate", "--sql").out == ""
    whole = run("migrate", "--sql-all").out
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(schema)))
        script = run("migrate", "--sql").out
        assert script == whole
        connection.execute(script.encode())
    assert run("migrate") == (0, f"schema {schema!r} is up to date\n", "")


@pytest.mark.conformance(250)
def test_stats_and_jobs_show_what_there_is(queue: venturi.Queue, run: cabc.Callable[..., Ran]) -> None:
    """Counts by kind, kinds that nobody handles, and pages of jobs, newest first."""
    first, second = (queue.enqueue(Touch(path)).id for path in "ab")
    assert "cli.touch  2      0" in run("stats").out
    assert "handled by no worker: cli.touch" in run("stats").out
    assert [line.split()[0] for line in run("jobs").out.splitlines()[1:]] == [str(second), str(first)]
    assert str(second) not in run("jobs", "--before", str(second)).out
    assert len(run("jobs", "--status", "dead").out.splitlines()) == 1


def test_job_and_journal_tell_why_a_job_failed(dead: venturi.Job, run: cabc.Callable[..., Ran]) -> None:
    """Reason and traceback are there, the payload only when asked for, and nothing that a terminal would obey."""
    job, journal = run("job", str(dead.id)), run("journal", str(dead.id))
    assert "status         dead" in job.out
    assert "terrible" not in job.out
    assert "terrible" in run("job", str(dead.id), "--payload").out
    assert r"\x1b[31mterrible\nreason" in journal.out
    assert "Traceback" in journal.out
    assert "\x1b" not in journal.out


@pytest.mark.conformance(250)
def test_requeue_cancel_and_cleanup_do_what_the_methods_do(
    queue: venturi.Queue, dead: venturi.Job, run: cabc.Callable[..., Ran]
) -> None:
    """Each changes the job as its method would, and is an error of one line where there is nothing to change."""

    def status() -> str | None:
        job = queue.job(dead.id)
        return None if job is None else job.status

    assert run("requeue", str(dead.id)) == (0, "requeued: 1\n", "")
    assert status() == "pending"
    assert run("requeue", str(dead.id)) == (1, "", f"venturi: there is no dead job {dead.id}\n")
    assert run("requeue", "--kind", "cli.fail") == (0, "requeued: 0\n", "")
    assert run("cancel", str(dead.id)) == (0, "cancelled\n", "")
    assert status() == "cancelled"
    assert run("cancel", str(dead.id)) == (1, "", f"venturi: there is no unfinished job {dead.id}\n")
    assert run("cleanup", "--before", "1h") == (0, "deleted: 0\n", "")
    assert run("cleanup", "--before", "99999999d") == (0, "deleted: 0\n", "")
    assert run("cleanup", "--before", "0", "--status", "dead") == (0, "deleted: 0\n", "")
    assert run("cleanup", "--before", "2999-01-01T00:00Z") == (0, "deleted: 1\n", "")
    assert status() is None


@pytest.mark.conformance(250)
@pytest.mark.parametrize(
    "arguments",
    [
        ("stats", "--dsn", "postgresql://user:pa%20ss-secret@127.0.0.1:1/x"),
        ("stats", "--dsn", "postgresql://user:p@ss-secret@127.0.0.1:1/x"),
        ("stats", "--dsn", "postgresql://user:ss-secret/@127.0.0.1:1/x"),
        ("stats", "--dsn", "ss-secret"),
        ("demo", "--dsn", "ss-secret"),
        ("demo", "/no/such/folder"),
        ("demo", __file__),
        ("migrate", "--schema", "pg_catalog"),
        ("work", "no_such_module"),
        ("work", "../jobs.py"),
        ("work", "venturi:no_such_queue"),
        ("work", "venturi:VenturiError"),
    ],
    ids=" ".join,
)
def test_an_expected_error_is_one_line_without_secrets(
    arguments: tuple[str, ...], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1, nothing on stdout, one line on stderr, and no part of a password (case 168)."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    assert main(arguments) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("venturi: ")
    assert err.count("\n") == 1
    assert "secret" not in err


def test_a_name_that_looks_like_a_secret_is_told_in_full(dsn: str, capfd: pytest.CaptureFixture[str]) -> None:
    """What the message advises can be typed as it stands."""
    assert main(["stats", "--dsn", dsn, "--schema", "a@b"]) == 1
    assert "run `venturi migrate --schema a@b`" in capfd.readouterr().err


@pytest.mark.parametrize("command", ["stats", "jobs", "cleanup --before 1d", "requeue --kind x"])
def test_commands_on_a_missing_queue_name_the_cure(command: str, dsn: str, capfd: pytest.CaptureFixture[str]) -> None:
    """They say that it has to be migrated, in one line."""
    assert main([*command.split(), "--dsn", dsn, "--schema", "nowhere"]) == 1
    assert re.fullmatch("venturi: .*run `venturi migrate --schema nowhere`\n", capfd.readouterr().err)


@pytest.mark.conformance(250)
@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("nonsense",),
        ("job", "12"),
        ("requeue",),
        ("requeue", "01a227d1-6bd5-7716-b23a-46aacf9266be", "--kind", "x"),
        ("cleanup",),
        ("cleanup", "--before", "soon"),
        ("cleanup", "--before", "2026-01-31"),
        ("cleanup", "--before", "2024"),
        ("cleanup", "--before", "30d", "--kind", ""),
        ("jobs", "--status", "sleeping"),
        ("jobs", "--limit", "0"),
        ("jobs", "--limit", "1001"),
        ("requeue", "--kind", "x", "--limit", "0"),
        ("migrate", "--sql", "--status"),
        ("demo", "--concurrency", "0"),
        ("work",),
        ("work", "venturi", "--poll", "never"),
        ("work", "venturi", "--schema", "x"),
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """argparse tells what is wrong."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: venturi" in capsys.readouterr().err


def test_the_version_is_told_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    """As with other programs, with exit code 0."""
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert re.fullmatch(r"venturi \d\S*\n", capsys.readouterr().out)


def test_output_that_nobody_reads_is_no_crash(queue: venturi.Queue, dsn: str) -> None:
    """Neither a traceback nor a complaint at exit when the reader of a pipe has gone."""
    queue.enqueue_many([Touch("x")] * 1000)
    command = [sys.executable, "-m", "venturi", "jobs", "--limit", "1000", "--schema", queue.schema, "--dsn", dsn]
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(venturi.__file__).parent.parent)}
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ran = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=environment, timeout=20, check=False)
    finally:
        os.close(writer)
    assert (ran.returncode, ran.stderr) == (1, b"")


@pytest.mark.conformance(193, 249)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_a_worker_in_order(
    number: signal.Signals, queue: venturi.Queue, worker: cabc.Callable[..., t.Any], tmp_path: pathlib.Path
) -> None:
    """The handler that runs ends by itself and is settled; the exit code is 0 (case 126)."""
    job = queue.enqueue(Touch(str(tmp_path / "ran"))).id
    process = worker("jobs:queue", "--concurrency", "2", "--backstop", "none", "--poll", "1m")
    eventually((tmp_path / "ran").exists, 10)
    assert shut(process, number)[0] == 0
    assert [entry.outcome for entry in queue.journal(job)] == ["completed"]


@pytest.mark.conformance(190, 249)
def test_a_worker_ends_by_its_deadline_though_a_handler_does_not(
    queue: venturi.Queue, worker: cabc.Callable[..., t.Any], tmp_path: pathlib.Path
) -> None:
    """The straggler's job is released, one line names it, and the exit code is 0 (case 140)."""
    job = queue.enqueue(Hang(str(tmp_path / "ran"))).id
    process = worker("jobs:queue", "--shutdown-timeout", "500ms")
    eventually((tmp_path / "ran").exists, 10)
    code, seconds = shut(process, signal.SIGTERM)
    assert code == 0
    assert 0.5 <= seconds < 5
    assert [entry.outcome for entry in queue.journal(job)] == ["released"]
    assert len([line for line in process.stderr.read().splitlines() if str(job) in line]) == 1


@pytest.mark.conformance(193, 249)
def test_a_second_signal_releases_at_once(
    queue: venturi.Queue, worker: cabc.Callable[..., t.Any], tmp_path: pathlib.Path
) -> None:
    """It does not wait for the deadline, half a minute ahead; more signals than two do no harm (case 127)."""
    job = queue.enqueue(Hang(str(tmp_path / "ran"))).id
    process = worker("jobs:queue")
    eventually((tmp_path / "ran").exists, 10)
    code, seconds = shut(process, signal.SIGINT, signal.SIGTERM, signal.SIGTERM)
    assert code == 0
    assert seconds < 5
    assert [entry.outcome for entry in queue.journal(job)] == ["released"]


@pytest.mark.conformance(249)
def test_a_worker_that_cannot_start_exits_with_1(worker: cabc.Callable[..., t.Any]) -> None:
    """A queue without handlers, a bad option, a missing schema and what is no queue are told in one line."""
    wrong = (["jobs:empty"], ["jobs:queue", "--concurrency", "0"], ["jobs:other"], ["jobs:missing"])
    for process in [worker(*arguments, "--log-level", "error") for arguments in wrong]:
        assert process.wait(20) == 1
        assert process.stderr.read().count("\n") == 1


@pytest.mark.conformance(249)
def test_a_worker_that_fails_for_good_exits_with_1(
    queue: venturi.Queue, dsn: str, worker: cabc.Callable[..., t.Any], tmp_path: pathlib.Path
) -> None:
    """Its queue was dropped: it says so and ends, though a handler still runs."""
    queue.enqueue(Hang(str(tmp_path / "ran")))
    process = worker("jobs:queue", "--concurrency", "2", "--poll", "0.1")
    eventually((tmp_path / "ran").exists, 10)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(queue.schema)))
    assert process.wait(20) == 1
    assert f"run `venturi migrate --schema {queue.schema}`" in process.stderr.read()
