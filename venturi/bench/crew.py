"""Worker processes, seen from the process that measures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import typing as t
from collections.abc import Generator
from contextlib import ExitStack, contextmanager

from venturi.bench.options import Options
from venturi.errors import VenturiError
from venturi.queue import Queue

__all__ = ["Crew", "crew"]


class Member:
    """One worker process; see `venturi.bench.worker` for what it says."""

    def __init__(self, queue: Queue, options: Options) -> None:
        numbers = (options.payload, options.concurrency, options.sleep)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "venturi.bench.worker", queue.schema, *map(str, numbers)],
            env={**os.environ, "VENTURI_DATABASE_URL": queue.store.dsn},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the process that measures; the input ends with it
        )
        self.count: int = 0
        self.last: float = 0.0

    def start(self) -> None:
        """Let it work."""
        said = t.cast(t.IO[str], self._process.stdin)
        said.write("\n")
        said.flush()

    def hear(self) -> str:
        """The next line that it says."""
        if line := t.cast(t.IO[str], self._process.stdout).readline():
            return line
        raise VenturiError(f"a worker process ended with status {self._process.wait()}")

    def update(self) -> None:
        """Wait for its next count."""
        count, last = self.hear().split()
        self.count, self.last = int(count), float(last)

    def stop(self) -> dict[int, float]:
        """End it; when each of its runs began, by the number of the job."""
        words, _ = self._process.communicate(timeout=60)
        return dict(json.loads(words.splitlines()[-1]))

    def close(self) -> None:
        """Kill it if it still runs."""
        with self._process:
            self._process.kill()


class Crew:
    """The worker processes, which work from now on.

    Attributes:
        started: When they were told to.
    """

    def __init__(self, members: list[Member]) -> None:
        self._members = members
        self.started: float = time.monotonic()
        for member in members:
            member.start()

    def wait_for(self, count: int) -> float:
        """Wait until so many runs have begun in all; when the last of them did."""
        while sum(member.count for member in self._members) < count:
            for member in self._members:
                member.update()
        return max(member.last for member in self._members)

    def stop(self) -> dict[int, float]:
        """End them; when each run began, by the number of the job."""
        return {i: began for member in self._members for i, began in member.stop().items()}


@contextmanager
def crew(queue: Queue, options: Options) -> Generator[Crew]:
    """As many worker processes as the options say, for the time of the block."""
    with ExitStack() as stack:
        members: list[Member] = []
        for _ in range(options.processes):
            members.append(Member(queue, options))
            stack.callback(members[-1].close)
        for member in members:
            member.hear()
        yield Crew(members)
