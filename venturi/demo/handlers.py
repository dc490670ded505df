"""The handlers: the worker's side. Each does its work and enqueues what follows in one transaction."""

from __future__ import annotations

import os
import stat
import typing as t

from psycopg_pool import ConnectionPool

import venturi
from venturi.demo import tables
from venturi.demo.display import shown
from venturi.demo.source import MAX_BYTES, contents
from venturi.demo.tasks import QUIET, IndexFile, Report, Walk, Walked

__all__ = ["SCHEMA", "State", "queue"]

SCHEMA = "venturi_demo"
FILES_A_RUN = 200
SKIPPED = {"__pycache__", "site-packages", "node_modules"}
COMPILED = (b".pyc", b".pyo", b".so", b".a", b".o", b".dll", b".dylib", b".pyd", b".exe")

State: t.TypeAlias = ConnectionPool[tables.Connection]
"""What the handlers share: the connections to the demo's own tables."""

queue: venturi.Queue[State] = venturi.Queue(SCHEMA)


@queue.handler
def walk(task: Walk, ctx: venturi.Context[Walked, State]) -> venturi.Outcome:
    """Read some directories, then pause: the carry says where to go on, in this process or in another one."""
    carry = ctx.carry
    ahead = [task.folder] if carry.ahead is None else carry.ahead
    found: list[bytes] = []
    while ahead and len(found) < FILES_A_RUN:
        try:
            directories, files = _scan(ahead.pop())
        except OSError:
            carry.closed += 1
            continue
        ahead += directories
        found += files
    with ctx.state.connection() as conn:
        # Files and jobs are there together or not at all. After a kill between this commit and the pause the run is
        # repeated with the old carry, and finds no new files.
        new = tables.add_files(conn, found)
        queue.enqueue_many([IndexFile(task.folder, path) for path in new], conn=conn)
        if not ahead:
            queue.enqueue(Report(task.folder, files=0), conn=conn, delay=QUIET)
    carry.ahead = ahead
    carry.found += len(found)
    if ahead:
        return venturi.Pause(note=f"{carry.found} files so far, {len(ahead)} directories ahead")
    return venturi.Completed(f"{carry.found} files, {carry.closed} directories closed to us")


def _scan(directory: bytes) -> tuple[list[bytes], list[bytes]]:
    """The directories and the files in a directory. Links are not followed, so that there are no loops."""
    directories: list[bytes] = []
    files: list[bytes] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if os.fsdecode(entry.name) not in SKIPPED and not entry.name.startswith(b"."):
                    directories.append(entry.path)
            elif entry.is_file(follow_symlinks=False) and not entry.name.endswith(COMPILED):
                files.append(entry.path)
    return directories, files


# These will not go away by trying again: the job ends dead at once. Any other error of the system may, and is retried.
HOPELESS = (
    SyntaxError,
    UnicodeDecodeError,
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
)


@queue.handler(dead_on=HOPELESS)
def index_file(task: IndexFile, ctx: venturi.Context[None, State]) -> venturi.Outcome:
    """Read a file, store what is in it, and ask for the report."""
    name = shown(task.path)
    ctx.attach(file=name)  # goes to the journal however the run ends
    found = contents(name, _read(task.path))
    with ctx.state.connection() as conn:
        if not tables.store(conn, task.path, found):
            return venturi.Completed("an earlier run had stored it")
        queue.enqueue(Report(task.folder, files=1), conn=conn, delay=QUIET)
    return None


def _read(path: bytes) -> bytes:
    # What was a file when it was found may be a pipe by now, and must not hold the slot up.
    with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise venturi.PermanentError("no regular file any more")
        return file.read(MAX_BYTES + 1)


@queue.handler
def report(task: Report, ctx: venturi.Context[None, State]) -> venturi.Outcome:
    """Add up, once nothing is left to do. Until then the job pauses: waiting takes no slot and is no failure."""
    with ctx.state.connection() as conn:
        kinds = queue.stats(conn=conn).kinds
        left = sum(k.ready + k.scheduled + k.claimed for kind, k in kinds.items() if kind != "demo.report")
        if left:
            return venturi.Pause(QUIET, note=f"{left} jobs are not done yet")
        tables.add_report(conn, tables.summary(conn))
    return venturi.Completed(f"asked for by {task.files} files")
