"""The program: find or begin the index, work on it in this process, and show how it goes."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sysconfig
import threading
import time
import warnings
from collections.abc import Generator
from contextlib import contextmanager

import psycopg
from psycopg_pool import ConnectionPool

import venturi
from venturi import embedded
from venturi.demo import tables
from venturi.demo.display import Progress, Show, display, listed, shown
from venturi.demo.handlers import queue
from venturi.demo.tasks import Walk

__all__ = ["run"]

LEASE = 5.0
"""Seconds. A lease outlives its worker, so this is what the files of a killed demo wait for."""

BACKSTOP = 5
"""Failures until a file is given up: some seconds, with the curve of `venturi.demo.tasks.IndexFile`."""

BUSY = 0x76656E64
"""The advisory lock that all running demos share, and that whoever begins anew needs alone."""


def run(
    folder: str | None = None,
    *,
    dsn: str | None = None,
    fresh: bool = False,
    concurrency: int = 4,
    terminal: bool = False,
) -> int:
    """Index a folder, show how it goes, and print the report.

    Args:
        folder: Default: None, the standard library of this Python.
        dsn: Which server. Default: None, see `venturi.embedded.database`.
        fresh: Whether to drop what an earlier run has left instead of going on with it. Default: False.
        concurrency: Files in work at once. Default: 4.
        terminal: Whether to draw on the terminal instead of printing lines. Default: False.

    Returns:
        0 when the index is complete, 130 when it was stopped before.

    Raises:
        VenturiError: The folder cannot be read, no server is found, or another demo is at work there.
        psycopg.OperationalError: The server does not answer.
    """
    path = _readable(sysconfig.get_path("stdlib") if folder is None else folder)
    # The folder is somebody else's code: what the parser warns of is no concern of ours.
    warnings.simplefilter("ignore", SyntaxWarning)
    warnings.simplefilter("ignore", DeprecationWarning)
    # What dies is told at the end; no line of the log shall tear the display.
    logging.getLogger("venturi").setLevel(logging.ERROR)
    # A syntax tree is a hundred thousand objects and no garbage; looking for some as usual takes a tenth of the time.
    gc.set_threshold(100_000)
    given = embedded.explicit(dsn)
    with embedded.database(given, name="demo") as server, psycopg.connect(server, autocommit=True) as conn:
        # The queue was made without a connection string, where the handlers are: it reads this at its first use.
        os.environ["VENTURI_DATABASE_URL"] = server
        try:
            _enter(conn, path, fresh)
            code = _work(conn, server, concurrency, terminal)
            print(f"\nThe index stays in {tables.place(conn, private=not given)}")
            return code
        finally:
            queue.close()


def _readable(folder: str) -> bytes:
    path = os.path.realpath(os.fsencode(folder))
    try:
        os.scandir(path).close()
    except OSError as error:
        raise venturi.ConfigError(f"{shown(path)} cannot be indexed: {error.strerror}") from error
    return path


def _enter(conn: tables.Connection, folder: bytes, fresh: bool) -> None:
    """Go on with the index that is there, or begin anew."""
    (alone,) = conn.execute("SELECT pg_try_advisory_lock(%s)", [BUSY]).fetchall()[0]
    conn.execute("SELECT pg_advisory_lock_shared(%s)", [BUSY])  # waits for one that is beginning anew
    index = tables.index(conn)
    if index is not None and index.folder == folder and index.report is None and not fresh:
        queue.migrate()  # an older version of venturi may have begun it
        print(f"continuing: {index.done} of {index.found} files were done", flush=True)
    elif alone:
        _begin(conn, folder, index)
    else:
        raise venturi.VenturiError("another demo is at work on this server: let it end, or stop it")
    if alone:
        conn.execute("SELECT pg_advisory_unlock(%s)", [BUSY])


def _begin(conn: tables.Connection, folder: bytes, index: tables.Index | None) -> None:
    if index is not None:
        state = "not complete" if index.report is None else f"complete for {index.age}"
        print(f"dropping the index of {shown(index.folder)}, {state}")
    print(f"indexing {shown(folder)}", flush=True)
    tables.drop(conn)
    queue.migrate()
    # Whoever kills the demo in here leaves an index with its walk, or none at all.
    with conn.transaction():
        tables.create(conn)
        receipt = queue.enqueue(Walk(folder), conn=conn)
        tables.begin(conn, folder, receipt.id)


def _work(conn: tables.Connection, server: str, concurrency: int, terminal: bool) -> int:
    began = time.monotonic()
    with ConnectionPool[tables.Connection](server, min_size=1, max_size=concurrency) as pool, _signals() as stop:
        with (
            queue.work(state=pool, block=False, concurrency=concurrency, lease=LEASE, backstop=BACKSTOP) as worker,
            display(terminal) as show,
        ):
            _watch(conn, worker, stop, show)
        report = worker.join()
    seconds = time.monotonic() - began
    index = tables.index(conn)
    if index is None or index.report is None:
        print(
            "stopped; start the demo again to go on"
            + (f": {index.done} of {index.found} files are done" if index else "")
        )
        return 130
    print(index.report)
    _tell(conn, index)
    runs = report.settled if report else 0
    print(f"\n{index.done} files are indexed; {runs} runs here in {seconds:.1f} s, {runs / seconds:.0f} a second")
    return 0


@contextmanager
def _signals() -> Generator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set: a worker that does not block leaves signals to the program."""
    stop = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def ask(number: int, frame: object) -> None:
        stop.set()

    previous = [signal.signal(number, ask) for number in numbers]
    try:
        yield stop
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)


def _watch(conn: tables.Connection, worker: venturi.Worker, stop: threading.Event, show: Show) -> None:
    """Show progress until the report is there or the user stops it."""
    began, first = time.monotonic(), None
    while not stop.wait(0.2) and worker.join(0) is None:
        stats = queue.stats(conn=conn)
        index = tables.index(conn)
        if index is None or index.report is not None:
            return
        if not any(kind.ready + kind.scheduled + kind.claimed for kind in stats.kinds.values()):
            raise venturi.VenturiError("nothing is left to do, but there is no report: begin anew with --fresh")
        files = stats.kinds.get("demo.index", venturi.KindStats())
        ended = index.done + files.dead
        first = ended if first is None else first
        show(
            Progress(
                found=index.found,
                done=index.done,
                dead=files.dead,
                retried=len(tables.failures(conn, "retried", "recovered")),
                workers=stats.workers,
                rate=(ended - first) / (time.monotonic() - began),
            )
        )


def _tell(conn: tables.Connection, index: tables.Index) -> None:
    """What went wrong, and a look into the journal."""
    print("\n".join(listed("retried", tables.failures(conn, "retried", "recovered"))))
    print("\n".join(listed("dead", tables.failures(conn, "dead"))))
    entries = queue.journal(index.walk, conn=conn)
    print("\nThe journal of the walk:")
    for entry in entries[:2] + entries[2:][-1:]:
        print(f"  run {entry.run_no}  {entry.outcome}  {entry.note}")
