"""One system in a database of its own: its workers, its jobs, and what became of them."""

from __future__ import annotations

import collections.abc as cabc
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import typing as t
import uuid

import attrs
import psycopg
from psycopg import conninfo, sql

import venturi
from venturi import embedded

__all__ = ["SYSTEMS", "Bench", "Effect", "NotMeasured", "System"]


class NotMeasured(Exception):
    """What the harm was to be done to was not there, so that the trial has no result."""


@attrs.frozen
class System:
    """A system under test.

    Attributes:
        states: SQL that gives the id and the state of every job.
        done: What it calls a job that has succeeded.
        claimed: What it calls a job that a worker holds.
        spoil: SQL that renames the fields in a job's payload.
        refusal: What a worker logs, beside the job's id, when its late result is refused; empty: nothing known.
        peer: Whether it runs in the peers' environment.
    """

    name: str
    states: t.LiteralString
    done: str
    claimed: str
    spoil: t.LiteralString
    refusal: str = ""
    peer: bool = True


SYSTEMS = (
    System(
        "venturi",
        "SELECT id::text, status FROM venturi.all_jobs",
        "completed",
        "claimed",
        """UPDATE venturi.jobs SET payload = '{"renamed": 1}' WHERE id::text = %s""",
        refusal="is not recorded",
        peer=False,
    ),
    System(
        "procrastinate",
        "SELECT id::text, status::text FROM procrastinate_jobs",
        "succeeded",
        "doing",
        """UPDATE procrastinate_jobs SET args = '{"renamed": 1}' WHERE id::text = %s""",
    ),
    System(
        "pgqueuer",
        # It deletes what has ended.
        """SELECT id::text, status::text FROM pgqueuer
            UNION ALL
           (SELECT DISTINCT ON (job_id) job_id::text, status::text FROM pgqueuer_log
             WHERE job_id NOT IN (SELECT id FROM pgqueuer) ORDER BY job_id, id DESC)""",
        "successful",
        "picked",
        """UPDATE pgqueuer SET payload = '{"renamed": 1}' WHERE id::text = %s""",
    ),
)


class Effect(t.NamedTuple):
    """A line of the log: ``start`` or ``end`` of a run, or ``ready`` of a worker; `at` is on the monotonic clock."""

    what: str
    job: str
    pid: int
    at: float


class Bench:
    """A fresh database with a system in it.

    Attributes:
        exits: How often a worker ended by itself, and was started again.
        version: The system's.
    """

    def __init__(self, server: embedded.Server, system: System, python: str, folder: pathlib.Path) -> None:
        self.server = server
        self.system = system
        self.exits = 0
        self.workers: list[subprocess.Popen[str]] = []
        self.database = f"matrix_{uuid.uuid4().hex[:12]}"
        self._python = python if system.peer else sys.executable
        self._log = folder / f"{self.database}.effects"
        self._words = folder / f"{self.database}.words"
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(self.database)))
        part = conninfo.conninfo_to_dict(server.dsn)
        self._dsn = f"postgresql://{part['user']}:{part['password']}@{part['host']}:{part['port']}/{self.database}"
        self._options: dict[int, tuple[float, float]] = {}
        self.version = t.cast(str, self.call("install"))

    def call(self, command: str, *arguments: object) -> t.Any:
        """Let the system do something in a process of its own, and give its answer."""
        line = self._line(command, *arguments)
        done = subprocess.run(line, capture_output=True, text=True, env=_environment(), cwd="/")
        if done.returncode:
            raise SystemExit(f"{self.system.name} {command} failed:\n{done.stderr}")
        return json.loads(done.stdout)

    def enqueue(self, count: int, seconds: float, act: str = "sleep") -> list[str]:
        """Enqueue jobs that take so long; their ids."""
        return t.cast(list[str], self.call("enqueue", act, seconds, count))

    def work(self, *, stretch: float = 1.0, stale: float = 3.0) -> subprocess.Popen[str]:
        """Start a worker, and return when it is about to look for jobs."""
        ready = len(self.effects("ready"))
        with self._words.open("a") as words:
            worker = subprocess.Popen(
                self._line("work", self._log, stretch, stale),
                stdout=words, stderr=words, text=True, env=_environment(), cwd="/",
            )  # fmt: skip
        self.workers.append(worker)
        self._options[worker.pid] = (stretch, stale)
        self.must(lambda: len(self.effects("ready")) > ready, 10, "a worker is ready")
        return worker

    def revive(self) -> None:
        """Start workers again that have ended by themselves, as a supervisor would."""
        for worker in [worker for worker in self.workers if worker.poll() is not None]:
            self.exits += 1
            self.workers.remove(worker)
            stretch, stale = self._options[worker.pid]
            time.sleep(0.5)
            self.work(stretch=stretch, stale=stale)

    def effects(self, what: str, job: str | None = None) -> list[Effect]:
        """The lines of the log of one sort."""
        with contextlib.suppress(FileNotFoundError):
            rows = (line.split() for line in self._log.read_text().splitlines())
            lines = [Effect(row[0], row[1], int(row[2]), float(row[3])) for row in rows]
            return [line for line in lines if line.what == what and job in (None, line.job)]
        return []

    def states(self, ids: cabc.Iterable[str]) -> dict[str, str]:
        """What the system says of these jobs; those that are missing it does not know."""
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            states: dict[str, str] = {row[0]: row[1] for row in connection.execute(self.system.states)}
        return {id: states.get(id, "unknown") for id in ids}

    def unfinished(self, ids: cabc.Iterable[str]) -> dict[str, str]:
        """Those of the jobs that have not succeeded."""
        return {id: state for id, state in self.states(ids).items() if state != self.system.done}

    def execute(self, statement: t.LiteralString, *parameters: object) -> int:
        """One statement in its database; how many rows it gave or changed."""
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            return connection.execute(statement, parameters).rowcount

    def said(self, *words: str) -> bool:
        """Whether its workers have printed a line with all of that."""
        return any(all(word in line for word in words) for line in self._words.read_text().splitlines())

    def until(self, condition: cabc.Callable[[], object], seconds: float, *, revive: bool = False) -> bool:
        """Ask until the answer is true, for so long; whether it was."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            if revive:
                self.revive()
            time.sleep(0.05)
        return True

    def must(self, condition: cabc.Callable[[], object], seconds: float, what: str) -> None:
        """Wait for what has to be so before harm is done.

        Raises:
            NotMeasured: It was not within that time.
        """
        if not self.until(condition, seconds):
            raise NotMeasured(f"not within {seconds:g} s: {what}")

    def close(self) -> None:
        """End its workers and drop its database."""
        for worker in self.workers:
            worker.send_signal(signal.SIGCONT)
            worker.kill()
            worker.wait()
        with psycopg.connect(self.server.dsn, autocommit=True) as connection:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(self.database)))

    def _line(self, command: str, *arguments: object) -> list[str]:
        module = f"matrix.worker_{self.system.name}"
        return [self._python, "-m", module, command, self._dsn, *map(str, arguments)]


def _environment() -> dict[str, str]:
    here = pathlib.Path(__file__).parents[1], pathlib.Path(venturi.__file__).parents[1]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, here))}
