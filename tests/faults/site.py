"""A WSGI server or a script with all its processes: started, asked, watched and made sure of by a test."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import typing as t
import urllib.request
import uuid

import psycopg
from faults.accounting import accounted
from faults.crew import query
from faults.deeds import Effect, effects
from fixtures.waiting import eventually
from psycopg import sql

import venturi

__all__ = ["Site"]

_WATCH = """
    CREATE TABLE {q}.backends (job uuid, backend int);
    CREATE FUNCTION {q}.note_backend() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN INSERT INTO {q}.backends VALUES (new.id, pg_backend_pid()); RETURN NULL; END $$;
    CREATE TRIGGER backends AFTER INSERT ON {q}.jobs FOR EACH ROW EXECUTE FUNCTION {q}.note_backend();
"""
"""Which session of the server inserted which job."""

COMPLAINTS = ("Traceback", "Exception ignored", "Fatal Python error")
"""What Python prints when an error was handled by nobody."""


class Site:
    """The processes of one server, or of one script.

    Args:
        dsn: The connection string of the queue.
        schema: Its schema.
        folder: Where the program and its logs are; it is the current folder of the processes.
    """

    def __init__(self, dsn: str, schema: str, folder: pathlib.Path) -> None:
        self.dsn = dsn
        self.schema = schema
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self._words = folder / "words"
        self._started: list[subprocess.Popen[bytes]] = []
        with psycopg.connect(dsn) as connection:
            connection.execute(sql.SQL(_WATCH).format(q=sql.Identifier(schema)))

    def start(self, *command: str | pathlib.Path) -> None:
        """Run a command: a program when it begins with a path, else what Python is to run."""
        path = (self.folder, pathlib.Path(__file__).parents[1], pathlib.Path(venturi.__file__).parents[1])
        known = {
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "VENTURI_DATABASE_URL": self.dsn,
            "FAULTS_SCHEMA": self.schema,
            "FAULTS_FOLDER": str(self.folder),
        }
        python = [] if isinstance(command[0], pathlib.Path) else [sys.executable]
        with self._words.open("a") as words:
            started = subprocess.Popen(
                [*python, *command],
                cwd=self.folder,
                env={**os.environ, **known},
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
                start_new_session=True,
            )
        self._started.append(started)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process that was started last."""
        return self._started[-1]

    @property
    def words(self) -> str:
        """What its processes have printed."""
        return self._words.read_text()

    def pids(self) -> set[int]:
        """Its living processes."""
        sessions = {process.pid for process in self._started}
        found: set[int] = set()
        for entry in pathlib.Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) in sessions and state != "Z":
                    found.add(int(entry.name))
        return found

    def ask(self, path: str) -> dict[str, t.Any]:
        """The answer to one request."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", data=b"", timeout=10) as answer:
            decoded: dict[str, t.Any] = json.load(answer)
            return decoded

    def serves(self, workers: int) -> None:
        """Wait until that many of its processes work, and the server answers from each of them."""
        __tracebackhide__ = True

        def all_there() -> bool:
            assert self.process.poll() is None, self.words
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return len(self.working()) == workers
            return False

        eventually(all_there, 20, what=f"{workers} processes serve and work")

    def working(self) -> set[int]:
        """Its living processes that have said in the database that they work."""
        return {row[0] for row in query(self.dsn, self.schema, "SELECT pid FROM {q}.workers")} & self.pids()

    def claimed(self) -> int:
        """How many jobs are claimed."""
        return int(query(self.dsn, self.schema, "SELECT count(*) FROM {q}.live WHERE owner IS NOT NULL")[0][0])

    def begun(self, job: str) -> Effect:
        """Wait until a run of the job has begun, and give the newest."""

        def started() -> list[Effect]:
            return [each for each in self.effects() if each.what == "start" and str(each.job) == job]

        return eventually(started, 20, what=f"job {job} has begun")[-1]

    def effects(self) -> list[Effect]:
        """What handlers have done."""
        return effects(self.folder / "effects")

    def enqueued(self) -> dict[uuid.UUID, int]:
        """The process that enqueued each job."""
        lines = (self.folder / "enqueued").read_text().splitlines()
        return {uuid.UUID(job): int(pid) for pid, job in (line.split() for line in lines)}

    def ends(self, status: int = 0, timeout: float = 15.0, complaints: t.Collection[str] = COMPLAINTS) -> None:
        """Wait until none of its processes is left, and make sure that none has complained."""
        __tracebackhide__ = True
        try:
            returned = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there after {timeout:g} s: {self.words}") from None
        eventually(lambda: not self.pids(), timeout, what="no process is left")
        assert returned == status, self.words
        for complaint in complaints:
            assert complaint not in self.words, self.words

    def accounted(self, *statuses: str) -> dict[str, int]:
        """Make sure that all its jobs are accounted for, and that no two processes used one session."""
        __tracebackhide__ = True
        enqueued = self.enqueued()
        users: dict[int, set[int]] = {}
        backends = dict(query(self.dsn, self.schema, "SELECT job, backend FROM {q}.backends"))
        assert backends.keys() == enqueued.keys()
        for job, backend in backends.items():
            users.setdefault(backend, set()).add(enqueued[job])
        assert [pids for pids in users.values() if len(pids) > 1] == [], users
        outcomes = accounted(
            self.dsn, self.schema, enqueued, statuses=statuses or ("completed", "pending"), effects=self.effects()
        )
        return dict(outcomes)

    def close(self) -> None:
        """Make sure that all its processes are gone."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._started:
            process.wait()
