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

# The worker stops when the last request is over, so that graceful_timeout is longer than the slowest request and the
# worker's shutdown_timeout together. A process that waits for its handlers shows gunicorn no sign of life, so that
# timeout is longer than shutdown_timeout too. Else gunicorn kills it before its jobs have been given back.
graceful_timeout = 40
timeout = 30
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


def worker_int(worker: t.Any) -> None:
    """In each process that is to end at once, by SIGQUIT or Ctrl+C: its jobs go back to the queue now."""
    for running in _running:
        running.stop(0)


# Where a request took longer than `timeout`: gunicorn kills the process a moment later.
worker_abort = worker_int


def worker_exit(server: t.Any, worker: t.Any) -> None:
    """In each process, before it ends in whatever way: by SIGTERM, after max_requests, or without its master."""
    for running in _running:
        running.stop()
        report = running.join()
        worker.log.info("venturi: %s", report)
