"""The commands and their options."""

from __future__ import annotations

import argparse
import functools
import typing as t

from venturi.cli import bench, operate, schema, show, work
from venturi.cli.values import count, duration, identifier, kind, moment, optional_whole, page
from venturi.telemetry import version
from venturi.values import Status

__all__ = ["parser"]

# argparse has no public name for it.
Commands: t.TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # pyright: ignore[reportPrivateUsage]

_EPILOG = """\
The database is that of --dsn, else of VENTURI_DATABASE_URL, else of DATABASE_URL, else of libpq's PG* variables.
Exit codes: 0 done, 1 an error that is told in one line, 2 wrong usage.
"""
_STATUSES = t.get_args(Status)


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; each command leaves its function in ``run``."""
    made = argparse.ArgumentParser(
        prog="venturi", description="Job queues on PostgreSQL.", epilog=_EPILOG, allow_abbrev=False
    )
    made.add_argument("--version", action="version", version=f"venturi {version()}", help="show the version and exit")
    commands = made.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (_migrate, _work, _look, _change, _bench, _demo):
        add(commands)
    return made


def _command(
    commands: Commands, name: str, run: t.Callable[[t.Any], int], help: str, *, database: bool = True
) -> argparse.ArgumentParser:
    made = commands.add_parser(name, help=help, description=help, epilog=_EPILOG, allow_abbrev=False)
    made.set_defaults(run=run, usage_error=made.error)
    if database:
        made.add_argument("--dsn", help="connection string of the database")
        made.add_argument("--schema", default="venturi", help="the queue's schema (default: venturi)")
    return made


def _migrate(commands: Commands) -> None:
    made = _command(commands, "migrate", schema.migrate, "Create or update the schema of a queue.")
    how = made.add_mutually_exclusive_group()
    how.add_argument("--status", action="store_true", help="only tell the version and what migrate would apply")
    how.add_argument("--sql", action="store_true", help="only print the SQL that migrate would run on that database")
    how.add_argument("--sql-all", action="store_true", help="print the SQL for a new queue, without asking a database")


def _work(commands: Commands) -> None:
    made = _command(
        commands,
        "work",
        work.work,
        "Run the jobs of a queue with the handlers of a module, until SIGTERM or SIGINT; a second one stops at once. "
        "Schema and database are the queue's own.",
        database=False,
    )
    made.add_argument(
        "target",
        metavar="MODULE[:QUEUE]",
        help="the module, importable from here, and the name of the venturi.Queue in it (default: the default queue)",
    )
    # What is not given leaves no attribute, and so the worker's default.
    add = functools.partial(made.add_argument, default=argparse.SUPPRESS)
    add("--concurrency", type=int, metavar="N", help="handlers that run at once (default: half the cores, 1 to 8)")
    add("--poll", type=duration, metavar="TIME", help="longest wait of an idle worker (default: 30s)")
    add("--lease", type=duration, metavar="TIME", help="how long a claim outlives its worker (default: 60s)")
    add("--shutdown-timeout", type=duration, metavar="TIME", help="wait for handlers when stopping (default: 30s)")
    add("--jitter", type=float, metavar="SHARE", help="largest share taken off a retry's delay (default: 0.5)")
    add("--backstop", type=optional_whole, metavar="N", help="failures until a job is dead, or none (default: 25)")
    add("--priority-ratio", type=optional_whole, metavar="N", help="how often a tier goes first, or none (default: 4)")
    made.add_argument(
        "--log-level", default="info", choices=["debug", "info", "warning", "error"], help="(default: info)"
    )


def _look(commands: Commands) -> None:
    _command(commands, "stats", show.stats, "Count the jobs of each kind by what they wait for.")
    made = _command(commands, "job", show.job, "Show one job.")
    made.add_argument("id", type=identifier)
    made.add_argument("--payload", action="store_true", help="show payload and carry too")
    made = _command(commands, "journal", show.journal, "Show all runs of a job and why they failed.")
    made.add_argument("id", type=identifier)
    made = _command(commands, "jobs", show.jobs, "List jobs, newest first.")
    made.add_argument("--kind", type=kind, help="only this kind")
    made.add_argument("--status", choices=_STATUSES, help="only this status")
    made.add_argument("--before", type=identifier, metavar="ID", help="only older ones: the last id of the page before")
    made.add_argument("--limit", type=page, default=50, metavar="N", help="most jobs to list, up to 1000 (default: 50)")


def _change(commands: Commands) -> None:
    made = _command(commands, "cancel", operate.cancel, "Cancel a job; the run of a claimed one is told to stop.")
    made.add_argument("id", type=identifier)
    made = _command(commands, "requeue", operate.requeue, "Send dead jobs back.")
    made.add_argument("id", type=identifier, nargs="?", help="this one")
    made.add_argument("--kind", type=kind, help="those of this kind, the longest dead first, up to --limit")
    made.add_argument("--limit", type=count, metavar="N", help="most jobs to send back with --kind (default: 1000)")
    made = _command(commands, "cleanup", operate.cleanup, "Delete finished jobs with their journal.")
    made.add_argument(
        "--before", type=moment, required=True, metavar="WHEN", help="finished before 30d ago, or 2026-01-31T00:00Z"
    )
    made.add_argument("--kind", type=kind, help="only this kind")
    made.add_argument("--status", choices=("completed", "dead", "cancelled"), help="only this status")


def _bench(commands: Commands) -> None:
    made = _command(
        commands,
        "bench",
        bench.bench,
        "Measure what a queue does on this server, in a schema made for that and dropped at the end.",
        database=False,
    )
    # What is not given leaves no attribute, and so the benchmark's default.
    add = functools.partial(made.add_argument, default=argparse.SUPPRESS)
    add("--dsn", help="connection string of the database, of a role that may create schemas")
    add("--jobs", type=int, metavar="N", help="jobs to enqueue and drain (default: 20000)")
    add("--concurrency", type=int, metavar="N", help="handlers that run at once in one process (default: 20)")
    add("--processes", type=int, metavar="N", help="worker processes (default: 1)")
    add("--producers", type=int, metavar="N", help="threads that enqueue side by side (default: 8)")
    add("--payload", type=int, metavar="BYTES", help="200, in fields of several types, or 0 (default: 200)")
    add("--sleep", type=int, metavar="MS", help="milliseconds that a handler sleeps (default: 0)")
    add("--rate", type=int, metavar="N", help="jobs a second that arrive steadily (default: half of what was drained)")
    add(
        "--only",
        type=lambda text: tuple(text.split(",")),
        metavar="NAME,...",
        help="only these measures (default: all)",
    )
    made.add_argument("--json", action="store_true", help="print one line of JSON")


def _demo(commands: Commands) -> None:
    made = _command(
        commands,
        "demo",
        operate.demo,
        "Index a folder of source code, one job a file, on a private server unless a database is given.",
        database=False,
    )
    made.add_argument("folder", nargs="?", help="(default: the standard library of this Python)")
    made.add_argument("--dsn", help="connection string (default: VENTURI_DATABASE_URL, DATABASE_URL, a private server)")
    made.add_argument("--fresh", action="store_true", help="drop what an earlier run has left instead of going on")
    made.add_argument("--concurrency", type=count, default=4, metavar="N", help="files in work at once (default: 4)")
