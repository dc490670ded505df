"""What the worker scripts of all systems have in common. It runs in the environment of each of them."""

from __future__ import annotations

import json
import os
import sys
import time
import typing as t

__all__ = ["CONCURRENCY", "RUNS", "Adapter", "Deeds", "main"]

CONCURRENCY = 4
"""Jobs that one worker runs at once."""

RUNS = 3
"""Runs that fail until a job is given up."""


class Deeds:
    """What handlers do.

    Args:
        log: Where starts and ends are written; all processes share it.
        stretch: By how much this worker's jobs take longer than told.
    """

    def __init__(self, log: str, stretch: float) -> None:
        self._handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._stretch = stretch

    def perform(self, job: object, act: str, seconds: float) -> None:
        """Sleep, or raise what the act says."""
        self.note("start", job)
        if act == "nul":
            raise ValueError("an error with \0 in it")
        if act == "exit":
            raise SystemExit(3)
        time.sleep(seconds * self._stretch)
        self.note("end", job)

    def note(self, what: str, job: object = "-") -> None:
        """Write a line to the log."""
        os.write(self._handle, f"{what} {job} {os.getpid()} {time.monotonic()}\n".encode())


class Adapter(t.Protocol):
    """One system."""

    def install(self, dsn: str) -> str:
        """Create its tables; its version."""
        ...

    def enqueue(self, dsn: str, act: str, seconds: float, count: int) -> list[str]:
        """Enqueue jobs in one go; their ids."""
        ...

    def work(self, dsn: str, deeds: Deeds, stale: float) -> None:
        """Work until SIGTERM; others may have the jobs of a worker that has been silent for `stale` seconds."""
        ...

    def duplicate(self, dsn: str) -> dict[str, str]:
        """Enqueue a duplicate of a pending job in a transaction, and tell of each way to do so what came of both."""
        ...


def main(adapter: Adapter) -> None:
    """Do what the command line says, and print the answer as JSON."""
    command, dsn, *rest = sys.argv[1:]
    answer: object = None
    match command:
        case "install":
            answer = adapter.install(dsn)
        case "enqueue":
            answer = adapter.enqueue(dsn, rest[0], float(rest[1]), int(rest[2]))
        case "work":
            deeds = Deeds(rest[0], float(rest[1]))
            deeds.note("ready")
            adapter.work(dsn, deeds, float(rest[2]))
        case "duplicate":
            answer = adapter.duplicate(dsn)
        case _:
            raise SystemExit(f"no such command: {command}")
    print(json.dumps(answer))
