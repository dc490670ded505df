"""A worker in a process of its own: ``python -m faults.labourer DSN SCHEMA LOG OPTIONS``.

It works until it is told to stop, and then prints its report and what it has left behind as one line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import signal
import sys
import threading
import time
import typing as t

__all__ = ["STEPS"]

STEPS: t.Final = ("claimed", "finished", "settled")
"""Where ``die_at`` kills: the claim is committed, the handler has returned, its end is committed."""


def main(dsn: str, schema: str, log: str, given: str) -> None:
    options: dict[str, t.Any] = json.loads(given)
    _shift_clock(options.pop("clock", 0))
    _die_at(options.pop("die_at", None))

    from faults import deeds

    import venturi

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(name)s %(message)s")
    queue: venturi.Queue[object] = venturi.Queue(schema, dsn=dsn, **options.pop("queue", {}))
    deeds.register(queue, pathlib.Path(log))
    work: t.Any = queue.work  # the options are checked when it is called
    report: venturi.Report = work(state=queue, **options)
    queue.close()
    stuck = {each.thread for each in report.released}
    left = {
        "settled": report.settled,
        "released": [str(each.id) for each in report.released],
        "unsettled": [str(each) for each in report.unsettled],
        "threads": sorted({each.name for each in threading.enumerate()} - {"MainThread"} - stuck),
        "sockets": _sockets(),
        "clock": time.time(),
    }
    print(json.dumps(left), flush=True)
    if threading.active_count() > 1:
        # Python would wait for the handlers that do not return.
        os._exit(0)


def _sockets() -> int:
    count = 0
    for handle in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists
            count += os.readlink(f"/proc/self/fd/{handle}").startswith("socket:")
    return count


def _shift_clock(seconds: float) -> None:
    """Let this process believe that it is later, or earlier."""
    if seconds:
        true, true_ns = time.time, time.time_ns
        time.time = lambda: true() + seconds
        time.time_ns = lambda: true_ns() + int(seconds * 1e9)


def _die_at(step: str | None) -> None:
    if step is None:
        return
    from venturi.worker import coordinator, flight

    room, method = {
        "claimed": (coordinator.Coordinator, "_start"),
        "finished": (flight.Inbox, "put"),
        "settled": (coordinator.Coordinator, "_recorded"),
    }[step]
    original = getattr(room, method)

    def die(self: object, *arguments: t.Any) -> None:
        if step != "finished" and not arguments[0]:
            original(self, *arguments)
            return
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(room, method, die)


if __name__ == "__main__":
    main(*sys.argv[1:])
