"""Worker processes, started, watched and killed by a test."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import typing as t
import uuid

import psycopg
from faults.deeds import Effect, effects
from fixtures.waiting import eventually
from psycopg import sql

import venturi

__all__ = ["Hand", "at_work", "begun", "done", "query"]


class Hand:
    """One worker process.

    Args:
        dsn: The connection string of its queue.
        schema: Its queue.
        folder: Where the log of effects, and what it says, are written.
        options: Of ``work()``, and those of `faults.labourer`, of which ``queue`` holds options of the queue.
    """

    def __init__(self, dsn: str, schema: str, folder: pathlib.Path, **options: t.Any) -> None:
        path = (pathlib.Path(__file__).parents[1], pathlib.Path(venturi.__file__).parents[1])
        self._words = folder / f"hand-{uuid.uuid4().hex[:8]}.log"
        with self._words.open("w") as words:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "faults.labourer", dsn, schema, folder / "effects", json.dumps(options)],
                stdout=subprocess.PIPE,
                stderr=words,
                text=True,
                cwd="/",
                env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
            )

    @property
    def pid(self) -> int:
        """Its process."""
        return self.process.pid

    @property
    def words(self) -> str:
        """What it has logged."""
        return self._words.read_text()

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill it, and wait until it is gone."""
        self.process.kill()
        self.process.wait()

    def ends(self, timeout: float = 10.0) -> dict[str, t.Any]:
        """Wait for its orderly end, make sure that it has left nothing open, and return its report."""
        __tracebackhide__ = True
        try:
            output, _ = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there after {timeout:g} s: {self.words}") from None
        assert self.process.returncode == 0, self.words
        report: dict[str, t.Any] = json.loads(output)
        assert (report["threads"], report["sockets"]) == ([], 0), report
        return report

    def stops(self, timeout: float = 10.0) -> dict[str, t.Any]:
        """Ask it to stop, and wait for its orderly end."""
        self.send(signal.SIGTERM)
        return self.ends(timeout)

    def close(self) -> None:
        """Make sure that it is gone."""
        self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()


def query(dsn: str, schema: str, text: t.LiteralString, *parameters: object) -> list[tuple[t.Any, ...]]:
    """The rows of one query; ``{q}`` stands for the schema."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        cursor = connection.execute(sql.SQL(text).format(q=sql.Identifier(schema)), parameters)
        return cursor.fetchall() if cursor.description else []


def at_work(dsn: str, schema: str, *hands: Hand, timeout: float = 10.0) -> None:
    """Wait until these processes have said in the database that they work."""

    def all_there() -> bool:
        for hand in hands:
            assert hand.process.poll() is None, hand.words
        there = {row[0] for row in query(dsn, schema, "SELECT pid FROM {q}.workers")}
        return {hand.pid for hand in hands} <= there

    eventually(all_there, timeout, what="the workers are there")


def begun(log: pathlib.Path, count: int, **like: int) -> list[Effect]:
    """Wait until that many runs have begun, and give them."""

    def enough() -> list[Effect] | None:
        starts = [each for each in effects(log) if each.what == "start"]
        starts = [each for each in starts if all(getattr(each, name) == value for name, value in like.items())]
        return starts if len(starts) >= count else None

    found = eventually(enough, 20, what=f"{count} runs have begun")
    assert found
    return found


def done(dsn: str, schema: str, timeout: float = 20.0) -> None:
    """Wait until the queue has no unfinished job."""

    def none_left() -> bool:
        return query(dsn, schema, "SELECT count(*) FROM {q}.live") == [(0,)]

    eventually(none_left, timeout, what="no job is unfinished")
