"""A worker process of the benchmarks: ``python -m venturi.bench.worker SCHEMA PAYLOAD CONCURRENCY SLEEP``.

It says ``ready``, waits for a line, and works until its input ends. Every 50 ms it says how many runs have begun and
when the last one did, and at the end all that have, as JSON. The database is that of VENTURI_DATABASE_URL, since
arguments are for everybody to see. Times are those of the monotonic clock, which the processes of a machine share.
"""

from __future__ import annotations

import json
import select
import sys
import time

import venturi
from venturi.bench.tasks import PAYLOADS, Task

__all__ = ["main"]


def main(schema: str, payload: int, concurrency: int, sleep: int) -> None:
    """Work until the input ends."""
    queue: venturi.Queue = venturi.Queue(schema)
    began: list[tuple[int, float]] = []

    @queue.handler(task=PAYLOADS[payload][0])
    def handle(task: Task) -> None:
        began.append((task.i, time.monotonic()))
        if sleep:
            time.sleep(sleep / 1000)

    print("ready", flush=True)
    sys.stdin.readline()
    with queue.work(block=False, concurrency=concurrency):
        while not select.select([sys.stdin], [], [], 0.05)[0]:
            print(len(began), began[-1][1] if began else 0, flush=True)
    print(json.dumps(began))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
