"""The tasks: what producers and workers both know. No database, no threads, no side effects."""

from __future__ import annotations

import datetime as dt
import hashlib

import attrs

import venturi

__all__ = ["IndexFile", "Report", "Walk", "Walked"]

QUIET = dt.timedelta(seconds=0.3)
"""How long no file must have finished before the report is tried."""


@attrs.define
class Walked:
    """What the walk keeps between its runs.

    Attributes:
        ahead: Directories that it has still to read; None before the first run.
        found: Files found so far.
        closed: Directories that it was not allowed to read.
    """

    ahead: list[bytes] | None = None
    found: int = 0
    closed: int = 0


# Names of files are bytes: on Unix they need not be text, and a task must come back as it was.
@venturi.task("demo.walk", priority=venturi.Priority.HIGH, carry=Walked)
class Walk:
    """Find the files of a folder, some directories a run."""

    folder: bytes


# Trouble with a disk or a network share is over in seconds or not at all.
@venturi.task("demo.index", backoff=venturi.Backoff(base=0.5, cap=5))
class IndexFile:
    """Read one file and store what is in it."""

    folder: bytes
    path: bytes


@venturi.task("demo.report", priority=venturi.Priority.LOW)
class Report:
    """Add everything up. Every file asks for it when it is done; the requests become one job."""

    folder: bytes
    files: int

    def dedup_key(self) -> str:
        return hashlib.sha256(self.folder).hexdigest()  # a key is text, and shorter than a path may be

    def merge(self, existing: venturi.Pending[Report]) -> venturi.Merge[Report]:
        both = Report(self.folder, self.files + existing.task.files)
        # The delay counts from now, so that each file that is done puts the report off a little.
        return venturi.Combine(both, delay=QUIET)
