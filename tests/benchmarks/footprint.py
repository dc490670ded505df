"""What a worker takes: ``python -m tests.benchmarks footprint --help``.

First an idle worker for a time: the statements that it sends, the processor time of its process, and its connections.
Then its resident memory while it drains a million jobs, every tenth of them. It reads /proc, and so needs Linux.
"""

from __future__ import annotations

import os
import pathlib
import time

from . import ground
from .crew import KINDS, Duty, crew, reach
from .ground import Site

BUDGET = 3
"""Connections of a worker: coordinator, listener, maintainer."""


def memory(process: int) -> float:
    """Its resident memory in MB."""
    lines = pathlib.Path(f"/proc/{process}/status").read_text().splitlines()
    return round(int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024, 1)


def processor(process: int) -> float:
    """Seconds of processor time that it has used."""
    fields = pathlib.Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def idle(site: Site, duty: Duty, seconds: float) -> dict[str, object]:
    """What a worker that has nothing to do sends and uses."""
    with crew(site, duty) as processes:
        process = processes[0].pid or 0
        time.sleep(3)  # its start, and its last looks before it parks
        before = processor(process)
        site.forget()
        time.sleep(seconds)
        used = processor(process) - before
        connections, kept = site.sessions(), memory(process)
        statements = site.ask(
            """SELECT calls, left(regexp_replace(query, '\\s+', ' ', 'g'), 60) FROM pg_stat_statements
                WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database())
                  AND query NOT LIKE '%%pg_stat_%%' ORDER BY calls DESC"""
        )
    minutes = seconds / 60
    return {
        "idle seconds": seconds,
        "statements": sum(calls for calls, _ in statements),
        "statements a minute": round(sum(calls for calls, _ in statements) / minutes, 1),
        "processor ms a minute": round(1000 * used / minutes, 1),
        "connections": connections,
        "budget": BUDGET,
        "memory MB": kept,
        "which": {text: calls for calls, text in statements},
    }


def draining(site: Site, duty: Duty, jobs: int) -> list[dict[str, object]]:
    """The memory of a worker after each tenth of the jobs."""
    site.fill(jobs, KINDS[0])
    site.ready()
    first, rows = site.entries(), list[dict[str, object]]()
    with crew(site, duty) as processes:
        process = processes[0].pid or 0
        begun, used = time.monotonic(), processor(process)
        for tenth in range(11):
            wanted = jobs * tenth // 10
            reach(site, processes, first + wanted)
            now, spent = time.monotonic(), processor(process)
            row: dict[str, object] = {
                "jobs": wanted,
                "memory MB": memory(process),
                "connections": site.sessions(),
                "jobs/s": round(jobs / 10 / (now - begun)) if tenth else 0,
                "processor us a job": round(1e6 * (spent - used) / (jobs / 10)) if tenth else 0,
            }
            begun, used = now, spent
            rows.append(row)
            ground.show(row)
    return rows


def main(arguments: list[str]) -> None:
    """Run both parts and print them."""
    parser = ground.parser("footprint", __doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="of being idle; default: 120")
    parser.add_argument("--jobs", type=int, default=1_000_000, help="to drain; default: a million")
    options = parser.parse_args(arguments)
    duty = Duty(concurrency=options.concurrency)
    with ground.server(options.dsn) as dsn:
        with ground.database(dsn) as site:
            ground.show(idle(site, duty, options.seconds * options.scale))
        with ground.database(dsn) as site:
            ground.table(draining(site, duty, max(1000, round(options.jobs * options.scale))))
