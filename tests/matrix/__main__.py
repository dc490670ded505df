"""The same faults, by the same script, for venturi and other queues: what is lost, run twice, or left behind.

    python -m venv peers && peers/bin/pip install -r tests/matrix/requirements.txt
    python -m tests.matrix --python peers/bin/python

Each pair of a fault and a system has a database of its own on a private server, and takes less than 20 s. One line
tells each result; a table in Markdown comes in the end. How each system is set up is in ``worker_<name>.py``.
"""

from __future__ import annotations

import argparse
import collections.abc as cabc
import datetime as dt
import pathlib
import sys
import tempfile
import time

import psycopg

# The helpers lie beside this package, where only pytest looks by itself.
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from matrix.bench import SYSTEMS, Bench, NotMeasured, System
from matrix.trials import TRIALS

from venturi import embedded


def main() -> None:
    names = [system.name for system in SYSTEMS]
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the peers; default: this one")
    parser.add_argument("--peers", type=_some(names), default=names, help=f"of {','.join(names)}; default: all")
    parser.add_argument(
        "--faults", type=_some(TRIALS), default=list(TRIALS), help=f"of {','.join(TRIALS)}; default: all"
    )
    given = parser.parse_args()
    systems = [system for system in SYSTEMS if system.name in given.peers]
    with embedded.server(tcp=True) as server, tempfile.TemporaryDirectory(prefix="matrix-") as folder:
        cells: dict[str, dict[str, str]] = {}
        versions: dict[str, str] = {}
        for fault in given.faults:
            for system in systems:
                versions[system.name], cell = _try(server, system, given.python, pathlib.Path(folder), fault)
                cells.setdefault(fault, {})[system.name] = cell
        print(f"\n{dt.date.today()}, PostgreSQL {_version(server.dsn)}\n")
        print(_table(cells, versions))


def _some(known: cabc.Collection[str]) -> cabc.Callable[[str], list[str]]:
    def names(given: str) -> list[str]:
        if unknown := set(given.split(",")) - set(known):
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
        return given.split(",")

    return names


def _try(server: embedded.Server, system: System, python: str, folder: pathlib.Path, fault: str) -> tuple[str, str]:
    bench = Bench(server, system, python, folder)
    began = time.monotonic()
    try:
        cell = TRIALS[fault](bench)
    except NotMeasured as error:
        cell = f"not measured: {error}"
    finally:
        server.start()
        bench.close()
    print(f"{fault:10} {system.name:14} {cell}   [{time.monotonic() - began:.0f} s]", flush=True)
    return bench.version, cell


def _version(dsn: str) -> str:
    with psycopg.connect(dsn) as connection:
        return connection.info.parameter_status("server_version") or "?"


def _table(cells: dict[str, dict[str, str]], versions: dict[str, str]) -> str:
    head = ["Fault", *(f"{name} {version}" for name, version in versions.items())]
    rows = [[(TRIALS[fault].__doc__ or fault).strip(), *row.values()] for fault, row in cells.items()]
    lines = [f"| {' | '.join(row)} |" for row in [head, *rows]]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


if __name__ == "__main__":
    main()
