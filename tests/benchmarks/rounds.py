"""venturi and other Python queues in turns on one server, and a table of the medians in Markdown.

    python -m tests.benchmarks rounds --dsn postgresql://... --peers PATH/peers.py --python PATH/python \\
        --against pgqueuer,oban --rounds 3 --jobs 20000 --concurrency 100

Each round runs ``compare`` and then every peer, each in a process of its own, so that all of them see the machine's
good and bad minutes. A ratio is venturi's median divided by the peer's: above 1 is better for rates, below 1 for times.
"""

from __future__ import annotations

import argparse
import collections.abc as cabc
import json
import os
import pathlib
import statistics
import subprocess
import sys
import typing as t

import psycopg
from psycopg import conninfo

from venturi.bench.settings import describe

from .compare import whole_chunks

__all__ = ["main", "markdown"]

Line: t.TypeAlias = dict[str, t.Any]

COLUMNS: dict[str, cabc.Callable[[Line], float]] = {
    "drain, jobs/s": lambda line: line["drain_per_s"],
    "enqueue, jobs/s": lambda line: line["enqueue_single_per_s"],
    "in bulk, jobs/s": lambda line: line["enqueue_bulk_per_s"],
    "pick-up p50, ms": lambda line: line["latency"]["p50_ms"],
    "p99, ms": lambda line: line["latency"]["p99_ms"],
}
OURS = "venturi"


def markdown(lines: cabc.Sequence[Line]) -> str:
    """The table of medians, and in brackets venturi's divided by the peer's.

    Args:
        lines: What was measured, in any order; venturi's are among them. Those with an ``error`` are left out.
    """
    names = dict.fromkeys([OURS, *(line["peer"] for line in lines)])
    medians = {name: _medians([line for line in lines if line["peer"] == name]) for name in names}
    rows = [("", *COLUMNS), ("---", *("---:" for _ in COLUMNS))]
    for name, own in medians.items():
        rows.append((name, *(_cell(medians[OURS].get(column), own.get(column), name) for column in COLUMNS)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _medians(lines: cabc.Sequence[Line]) -> dict[str, float]:
    measured = [line for line in lines if "error" not in line]
    return {column: statistics.median(map(of, measured)) for column, of in COLUMNS.items()} if measured else {}


def _cell(ours: float | None, own: float | None, name: str) -> str:
    if own is None:
        return "failed"
    shown = f"{round(own, 2) if own < 100 else round(own):g}"
    return shown if name == OURS or not ours or not own else f"{shown} ({ours / own:.2f})"


def _run(command: cabc.Sequence[str], name: str, password: str) -> Line:
    """Run one queue's turn; the line that it prints."""
    root = pathlib.Path(__file__).parents[2]
    environment = {**os.environ, "PGPASSWORD": password}
    done = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode or not done.stdout:
        return {"peer": name, "error": f"ended with {done.returncode}"}
    return t.cast(Line, json.loads(done.stdout.splitlines()[-1]))


def main(arguments: list[str]) -> None:
    """Run the rounds, print every line, and then the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks rounds")
    parser.add_argument("--dsn", required=True, help="host, port and user of a role that may create databases")
    parser.add_argument("--peers", type=os.path.abspath, required=True, help="the script that runs the others")
    parser.add_argument("--python", required=True, help="the Python in which they are installed")
    parser.add_argument("--against", default="pgqueuer,oban,chancy,awa,procrastinate", help="some of the others")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=whole_chunks, default=20000)
    parser.add_argument("--concurrency", type=int, default=100)
    options = parser.parse_args(arguments)
    with psycopg.connect(options.dsn) as connection:
        settings = {**describe(connection), "jobs": options.jobs, "concurrency": options.concurrency}
    print(json.dumps(settings), flush=True)
    print(markdown(list(_rounds(options))))


def _rounds(options: argparse.Namespace) -> cabc.Iterator[Line]:
    # The password goes another way than the arguments, which everybody on the machine can see.
    given = {"password": os.environ.get("PGPASSWORD", "none"), **conninfo.conninfo_to_dict(options.dsn)}
    password = str(given.pop("password"))
    dsn = conninfo.make_conninfo("", **given)
    work = [f"--dsn={dsn}", f"--jobs={options.jobs}", f"--concurrency={options.concurrency}"]
    commands = {OURS: [sys.executable, "-m", "tests.benchmarks", "compare", *work]}
    for name in options.against.split(","):
        commands[name] = [options.python, options.peers, *work, f"--only={name}"]
    for _ in range(options.rounds):
        for name, command in commands.items():
            line = _run(command, name, password)
            print(json.dumps(line), flush=True)
            yield line
