"""What waking workers costs those who enqueue: ``python -m tests.benchmarks notify --help``.

Producers commit single enqueues as fast as they can, by pgbench with the queue's own statement, so that what is
measured is the server and not Python. A commit that notifies takes a lock of the whole server's, which is why an
enqueue rings only while some worker is parked. Each case is run without and with the bell, and the share kept is the
one by the other. Without it the workers poll, twenty times a second.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import subprocess
import tempfile
import time

import attrs

from venturi.embedded import binaries
from venturi.store.sql import INSERT, Sql

from . import ground
from .crew import KINDS, Duty, crew
from .ground import SCHEMA, Site

PARAMETERS = ("gen_random_uuid()", f"'{KINDS[0]}'", "'{\"i\": 1}'", "1", "NULL", "NULL", "NULL", "interval '0'")
"""Of `INSERT`: id, kind, payload, priority, key, trace, and when it is due; the last two are the bell."""


@attrs.frozen
class Case:
    """Who works while it is enqueued.

    Attributes:
        own: Workers of the kind that is enqueued.
        others: Workers of another kind, which are idle and so parked.
    """

    name: str
    own: int = 0
    others: int = 0


CASES = (
    Case("no worker"),
    Case("one idle worker of another kind", others=1),
    Case("three workers of the kind", own=3),
    Case("one worker of the kind, one idle of another", own=1, others=1),
)


def script(folder: pathlib.Path, *, notify: bool) -> pathlib.Path:
    """A file with the enqueue as pgbench is to send it."""
    statements = Sql(SCHEMA, notify=notify)
    pieces = statements(INSERT).decode().split("%s")
    bell = statements.bell(KINDS[0])
    values = (*PARAMETERS, bell, f"'{bell}'", "")
    whole = "".join(f"{piece}{value}" for piece, value in zip(pieces, values, strict=True))
    path = folder / f"enqueue-{notify}.sql"
    path.write_text(" ".join(whole.replace("%%", "%").split()) + ";\n")
    return path


def committed(dsn: str, file: pathlib.Path, producers: int, seconds: float) -> float:
    """Commits per second of so many sessions."""
    pgbench = binaries.server_binaries(binaries.Account.choose()) / "pgbench"
    told = subprocess.run(
        [
            pgbench, "--no-vacuum", "--protocol=prepared", f"--file={file}", f"--client={producers}",
            f"--jobs={min(producers, os.cpu_count() or 1)}", f"--time={max(1, round(seconds))}", dsn,
        ],
        check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
    ).stdout  # fmt: skip
    found = re.search(r"tps = ([0-9.]+)", told)
    if found is None:
        raise SystemExit(f"pgbench said: {told}")
    return float(found[1])


def run(site: Site, case: Case, producers: int, seconds: float, concurrency: int, *, notify: bool) -> dict[str, object]:
    """One run of a case."""
    poll = 30.0 if notify else 0.05
    own, other = Duty(concurrency=concurrency, poll=poll), Duty(concurrency=1, first=1, poll=poll)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        file = script(pathlib.Path(folder), notify=notify)
        if case.own or case.others:
            stack.enter_context(crew(site, *[own] * case.own, *[other] * case.others))
            time.sleep(1)  # they start, find nothing, and park
        first = site.entries()
        rate = committed(site.dsn, file, producers, seconds)
        done = site.entries() - first
    return {"commits/s": round(rate), "done %": round(100 * done / max(1.0, rate * seconds))}


def compared(dsn: str, case: Case, producers: int, seconds: float, concurrency: int) -> dict[str, object]:
    """A case without the bell and with it, each in a fresh database."""
    row: dict[str, object] = {"case": case.name, "producers": producers}
    for notify in (False, True):
        with ground.database(dsn) as site:
            figures = run(site, case, producers, seconds, concurrency, notify=notify)
        row |= {f"{name}, {'bell' if notify else 'no bell'}": figure for name, figure in figures.items()}
    quiet, loud = (float(str(row[f"commits/s, {bell}"])) for bell in ("no bell", "bell"))
    return row | {"kept %": round(100 * loud / quiet)}


def main(arguments: list[str]) -> None:
    """Run the cases and print them."""
    parser = ground.parser("notify", __doc__)
    parser.add_argument("--producers", default="1,8,32", help="numbers of sessions that enqueue; default: 1,8,32")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run; default: 10")
    options = parser.parse_args(arguments)
    rows: list[dict[str, object]] = []
    with ground.server(options.dsn) as dsn:
        for case in CASES:
            for producers in map(int, options.producers.split(",")):
                rows.append(compared(dsn, case, producers, options.seconds * options.scale, options.concurrency))
                ground.show(rows[-1])
    ground.table(rows)
