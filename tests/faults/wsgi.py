"""The WSGI application that the servers run: requests enqueue deeds, with their own connection or the queue's.

One deed is enqueued at import, which in a preforking server leaves a pool in the parent. Each line of the log
``enqueued`` says which process enqueued which job.
"""

from __future__ import annotations

import collections.abc as cabc
import functools
import json
import os
import pathlib
import time
import typing as t
import urllib.parse
import uuid

import psycopg
from faults import deeds
from faults.deeds import Deed

import venturi

__all__ = ["Deed", "app", "enqueue", "queue"]

FOLDER = pathlib.Path(os.environ["FAULTS_FOLDER"])

queue: venturi.Queue[object] = venturi.Queue(os.environ["FAULTS_SCHEMA"])
# Leases that end within a test, whoever starts the worker.
t.cast(t.Any, queue).work = functools.partial(queue.work, concurrency=2, lease=1, poll=0.2)
deeds.register(queue, FOLDER / "effects")


def enqueue(deed: Deed, conn: psycopg.Connection | None = None) -> uuid.UUID:
    """Enqueue it, and write down who did."""
    job = queue.enqueue(deed, conn=conn).id
    with (FOLDER / "enqueued").open("a") as log:
        log.write(f"{os.getpid()} {job}\n")
    return job


def app(environ: dict[str, t.Any], start: cabc.Callable[..., object]) -> list[bytes]:
    """``/conn`` and ``/pool`` enqueue a deed, as the query says; ``/hang`` hangs."""
    if environ["PATH_INFO"] == "/hang":
        time.sleep(30)
    told = dict(urllib.parse.parse_qsl(environ.get("QUERY_STRING", "")))
    deed = Deed(told.get("act", "sleep"), float(told.get("seconds", 0)), once="once" in told)
    if environ["PATH_INFO"] == "/conn":
        with psycopg.connect(os.environ["VENTURI_DATABASE_URL"], application_name="request") as conn:
            job = enqueue(deed, conn)
    else:
        job = enqueue(deed)
    start("200 OK", [("Content-Type", "application/json")])
    return [json.dumps({"job": str(job), "pid": os.getpid()}).encode()]


enqueue(Deed())
