"""One worker thread in each gunicorn process, started after the fork and stopped before the process ends.

gunicorn --chdir examples --config examples/gunicorn_conf.py flask_app:app

Each process takes three connections for its worker, and up to `pool_size` for its requests while they enqueue.
"""

import typing as t

import venturi

workers = 2
threads = 4

# Safe: importing the application opens no connection and starts no thread, so that there is nothing to inherit.
preload_app = True

# Longer than the worker's shutdown_timeout, or gunicorn kills the process before its jobs have been given back.
graceful_timeout = 30
SHUTDOWN_TIMEOUT = 20

_running: list[venturi.Worker] = []


def on_starting(server: t.Any) -> None:
    """In the master, once: a deployment with several machines runs `venturi migrate` before them all instead."""
    from flask_app import queue

    queue.migrate()


def post_worker_init(worker: t.Any) -> None:
    """In each process, after the fork and with the application loaded."""
    from flask_app import queue

    # With block=False venturi leaves the signals to gunicorn.
    _running.append(queue.work(block=False, shutdown_timeout=SHUTDOWN_TIMEOUT))


def worker_exit(server: t.Any, worker: t.Any) -> None:
    """In each process, before it ends: after SIGTERM, and after max_requests."""
    for running in _running:
        running.stop()
        report = running.join()
        worker.log.info("venturi: %s", report)
