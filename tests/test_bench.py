"""``venturi bench``, and the benchmark that compares venturi with others, on small numbers."""

from __future__ import annotations

import collections.abc as cabc
import json
import os
import pathlib
import signal
import subprocess
import sys
import typing as t
import uuid

import psycopg
import pytest
from benchmarks import compare, rounds
from fixtures.waiting import eventually

import venturi
from venturi.bench import MEASURES, measures
from venturi.bench.crew import crew
from venturi.bench.options import Options
from venturi.bench.scratch import Scratch, scratch
from venturi.bench.settings import describe
from venturi.bench.tasks import Noop
from venturi.cli import main

FIELDS = ["peer", "enqueue_bulk_per_s", "enqueue_single_per_s", "drain_per_s", "ran", "latency"]
DEPENDS_ON = ["cores", "memory", "os", "python", "postgresql", "fsync", "synchronous_commit", "full_page_writes",
              "shared_buffers", "wal_level"]  # fmt: skip
WORKERS = (
    "SELECT pid FROM pg_stat_activity WHERE application_name = 'venturi listener' AND datname = current_database()"
)
SCHEMAS = "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'venturi_bench_%'"


@pytest.fixture(autouse=True)
def _nothing_left(dsn: str) -> cabc.Iterator[None]:
    """Each of these tests leaves no schema behind."""
    yield
    with psycopg.connect(dsn) as connection:
        assert connection.execute(SCHEMAS).fetchall() == []


@pytest.fixture
def made(dsn: str) -> cabc.Iterator[Scratch]:
    """A scratch queue."""
    with scratch(dsn, lambda line: None) as made:
        yield made


def test_the_settings_name_machine_server_and_durability(dsn: str) -> None:
    """A figure is printed with all that it depends on."""
    with psycopg.connect(dsn) as connection:
        described = describe(connection)
        assert list(described) == DEPENDS_ON
        connection.execute("SET synchronous_commit = off")
        assert describe(connection)["synchronous_commit"] == "off"


def test_every_measure_gives_its_figures(
    dsn: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line of JSON has the settings, a figure of each measure, and the ratios to what goes without a queue."""
    monkeypatch.setattr(measures, "SETTLE_SECONDS", 0.1)
    assert main(["bench", "--dsn", dsn, "--jobs", "100", "--concurrency", "3", "--rate", "500", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert list(result["settings"])[: len(DEPENDS_ON)] == DEPENDS_ON
    assert {"jobs": 100, "concurrency": 3, "payload": 200, "batch": 1000}.items() <= result["settings"].items()
    assert list(result["figures"]) == list(MEASURES)
    assert all(figures.get("per_s", 1) > 0 for figures in result["figures"].values())
    assert [*result["figures"]["steady"]] == ["per_s", "p50_ms", "p99_ms"]
    assert set(result["ratios"]) == {name for name, measure in MEASURES.items() if measure.against}


def test_a_table_shows_the_measures_chosen_beside_their_reference(dsn: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Only what was asked for is measured, with what it is compared with, and the schema's end is told."""
    assert main(["bench", "--dsn", dsn, "--jobs", "20", "--payload", "0", "--only", "transaction"]) == 0
    written = capsys.readouterr()
    *settings, _, titles, insert, transaction = written.out.splitlines()
    assert [line.split()[0] for line in settings][: len(DEPENDS_ON)] == DEPENDS_ON
    assert titles.split()[:2] == ["measure", "jobs/s"]
    assert (insert.split()[0], transaction.split()[0]) == ("insert", "transaction")
    assert transaction.endswith("x insert")
    assert written.err.splitlines()[-1].startswith("dropped the schema venturi_bench_")


def test_several_processes_share_the_jobs(made: Scratch) -> None:
    """Worker processes are real ones, and each job is counted in one of them."""
    made.queue.enqueue_many([Noop(i) for i in range(40)])
    with crew(made.queue, Options(payload=0, processes=2, concurrency=1, sleep=5)) as workers:
        assert workers.wait_for(40) > workers.started
        began = workers.stop()
    assert sorted(began) == list(range(40))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("jobs", "0"),
        ("concurrency", "0"),
        ("processes", "-1"),
        ("producers", "0"),
        ("payload", "100"),
        ("sleep", "-1"),
        ("rate", "0"),
        ("only", "drain,nothing"),
    ],
)
def test_options_out_of_bounds_are_refused(
    dsn: str, option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong option is named in one line, and nothing is measured."""
    assert main(["bench", "--dsn", dsn, f"--{option}", value]) == 1
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.startswith(f"venturi: {option}=")
    assert written.err.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_benchmark_drops_its_schema(dsn: str, number: signal.Signals) -> None:
    """Neither Ctrl-C nor SIGTERM leaves a schema or a worker process behind."""
    command = [sys.executable, "-m", "venturi", "bench", "--only", "drain", "--jobs", "10", "--sleep", "60000"]
    command += ["--concurrency", "1"]
    root = str(pathlib.Path(venturi.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "VENTURI_DATABASE_URL": dsn}

    def listen() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell ignores it for what it starts in the background

    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=listen) as process:
        said = t.cast(t.IO[str], process.stderr)
        assert said.readline().startswith("works in the schema venturi_bench_")
        with psycopg.connect(dsn, autocommit=True) as connection:
            eventually(lambda: connection.execute(WORKERS).fetchall(), 30, what="a worker process is at work")
        process.send_signal(number)
        assert process.communicate(timeout=30)[1].splitlines()[-1].startswith("dropped the schema venturi_bench_")
        assert process.returncode == 130


def test_compare_gives_the_fields_of_the_side_by_side_benchmark(dsn: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its line can stand among those of the other queues."""
    name = f"bench_{uuid.uuid4().hex[:8]}"
    try:
        compare.main(["--dsn", dsn, "--jobs", "1000", "--latency", "3", "--database", name])
    finally:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)".encode())
    line = json.loads(capsys.readouterr().out)
    assert list(line) == FIELDS
    assert line["ran"] == 1300
    assert list(line["latency"]) == ["p50_ms", "p99_ms"]


def test_rounds_are_summed_up_by_medians_and_ratios() -> None:
    """The table divides venturi's median by the peer's, and shows a peer that failed throughout as such."""

    def line(peer: str, rate: int, time: float) -> dict[str, t.Any]:
        latency = {"p50_ms": time, "p99_ms": time}
        return dict(zip(FIELDS, (peer, rate, rate, rate, 1300, latency), strict=True))

    lines = [line("venturi", n, 1.0) for n in (100, 300, 200)] + [line("slow", 50, 4.0), {"peer": "slow", "error": ""}]
    *_, ours, slow, broken = rounds.markdown([*lines, {"peer": "broken", "error": "?"}]).splitlines()
    assert ours == "| venturi | 200 | 200 | 200 | 1 | 1 |"
    assert slow == "| slow | 50 (4.00) | 50 (4.00) | 50 (4.00) | 4 (0.25) | 4 (0.25) |"
    assert broken == "| broken | failed | failed | failed | failed | failed |"
