"""One worker: its parts, its start, and its orderly stop.

A stop goes through these steps, whoever asks for it and however often: no more claims; every handler is told;
handlers that end are settled by what they did; at the deadline the claims of the others are given back, in one
statement and without waiting for their threads; then maintainer, listener and slots end. A second signal, or
``stop(0)``, only moves the deadline.
"""

from __future__ import annotations

import datetime as dt
import math
import os
import signal
import threading
import time
import types
import typing as t
import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress

import psycopg

from venturi import checks
from venturi.errors import SchemaError
from venturi.log import Log, log
from venturi.store.connections import CALL_SECONDS
from venturi.values import Report
from venturi.worker.coordinator import Coordinator
from venturi.worker.flight import Flight, Inbox
from venturi.worker.parts import GRACE, Parts, host
from venturi.worker.settings import Settings
from venturi.worker.threads import spawn

if t.TYPE_CHECKING:
    from venturi.queue import Queue

__all__ = ["Worker"]

logger: Log = log("venturi.worker")

WATCH = 0.25
"""Seconds between looks at a stop event, which cannot wake the coordinator."""

_running: set[Worker] = set()
_ending = threading.Event()


class Worker:
    """Runs the jobs of one queue; made by ``queue.work()``.

    Args:
        queue: The queue, with its handlers.
        state: Given to every handler as ``ctx.state``.
        options: See `WorkOptions`.

    Raises:
        ConfigError: An option is out of its bounds, or the handlers cannot be used.
    """

    def __init__(self, queue: Queue[t.Any], *, state: object = None, **options: t.Any) -> None:
        self.settings: Settings = Settings.of(options)
        self.queue = queue
        self.id: uuid.UUID = uuid.uuid4()
        self._state = state
        self._stop_at = math.inf
        self._stop_asked_at = math.inf
        self._process = os.getpid()
        self._begun = False
        self._thread: threading.Thread | None = None
        self._done = threading.Event()
        self._failure: BaseException | None = None
        self._report: Report | None = None
        self._flight = Flight()
        self._inbox = Inbox()
        queue.registry.bind()

    @property
    def name(self) -> str:
        """Host and process."""
        return f"{host()}:{os.getpid()}"

    def __repr__(self) -> str:
        running = f"running={len(self._flight)}/{self.settings.concurrency}"
        return f"<venturi.Worker {self.name} {self.queue.schema!r} {running}>"

    # --- Start and stop

    def run(self) -> Report:
        """Work until told to stop; where it works already, wait for its end.

        It works on this thread, but for one that a KeyboardInterrupt may reach: the answer to a claim could be lost by
        it.

        Raises:
            SchemaError: The schema is missing or does not fit this version.
            Exception: What made an internal thread fail for good.
        """
        if self._begun:
            return t.cast(Report, self.join())
        self._begun = True
        if threading.current_thread() is not threading.main_thread():
            return self._work()
        if not self.settings.signals:
            return self._run_beside()
        with self._signals():
            return self._work()

    def _run_beside(self) -> Report:
        """Work on another thread, and take what is raised in this one as a stop; it is raised again at the end."""
        self._thread = spawn("venturi-coordinator", self._work_aside)
        interrupt: BaseException | None = None
        while not self._done.is_set():
            try:
                self._done.wait()
            except BaseException as error:
                self.stop(0 if interrupt is not None else None)
                interrupt = error
        if interrupt is not None:
            raise interrupt
        return t.cast(Report, self.join())

    def start(self) -> Worker:
        """Work on a thread of its own, unless it works already; returns at once.

        Raises:
            SchemaError: The schema is missing or does not fit this version.
        """
        if self._begun:
            return self
        # While the server is away, the worker waits for it.
        with suppress(psycopg.Error):
            self.queue.store.session("venturi worker", self._patience).close()
        self._begun = True
        self._thread = spawn("venturi-coordinator", self._work_alone)
        return self

    def stop(self, timeout: float | dt.timedelta | None = None) -> None:
        """Stop in order; from any thread or signal handler, any number of times, before the start too. Does not wait.

        Args:
            timeout: Seconds, or a timedelta, until claims are given back; it can only bring the deadline nearer. 0
                gives them back at once. Default: None, the worker's ``shutdown_timeout``.
        """
        seconds = self.settings.shutdown_timeout if timeout is None else checks.seconds("timeout", timeout, 0)
        now = time.monotonic()
        self._stop_asked_at = min(self._stop_asked_at, now)
        self._stop_at = min(self._stop_at, now + seconds)
        self._inbox.call()

    def join(self, timeout: float | dt.timedelta | None = None) -> Report | None:
        """Wait until a worker that has begun has stopped.

        Args:
            timeout: Longest wait in seconds, or as a timedelta. Default: None, no bound.

        Returns:
            Its report; None when it has not stopped yet, and at once in a child that was forked since: the worker is
            its parent's.

        Raises:
            Exception: What ended the worker before it was told to stop.
        """
        longest = None if timeout is None else min(checks.seconds("timeout", timeout, 0), threading.TIMEOUT_MAX)
        # Not by Thread.join, which takes a thread for ended when a KeyboardInterrupt comes in between.
        if self._begun and self._is_here() and self._done.wait(longest) and self._thread is not None:
            self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self._report

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
        self.join()

    def _is_here(self) -> bool:
        # By the process, since not every server that forks (uWSGI) runs what os.register_at_fork() was given.
        return self._process == os.getpid()

    def _work_alone(self) -> None:
        self._work_aside()
        if self._failure is not None:
            logger.error("%s: the worker has failed", self.name, exc_info=self._failure)

    def _work_aside(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._failure = self._failure or error
        finally:
            self._done.set()

    # --- The work

    def _work(self) -> Report:
        try:
            parts = self._parts()
        except BaseException as error:
            self._failure = self._failure or error
            self._done.set()
            raise
        self.queue.store.local.add(parts.committed)
        _running.add(self)
        try:
            if _ending.is_set():
                self.stop()
            self._start(parts)
            self._loop(parts.coordinator)
        except BaseException as error:
            self._failure = self._failure or error
            self.stop(0)
            raise
        finally:
            self.queue.store.local.remove(parts.committed)
            self._stop_asked_at = self._stop_at = min(self._stop_at, time.monotonic())
            try:
                self._report = parts.stop(self._stop_at + GRACE)
            finally:
                _running.discard(self)
                self._done.set()
        if self._failure is not None:
            raise self._failure
        return self._report

    def _start(self, parts: Parts) -> None:
        try:
            parts.start()
        except RuntimeError:
            # The main thread has ended meanwhile, after which no thread can be started.
            if not _ending.is_set():
                raise
            self.stop(0)

    def _loop(self, coordinator: Coordinator) -> None:
        """Step until the stop is done or its deadline is over."""
        longest = CALL_SECONDS if self.settings.stop is None else WATCH
        while not self._stopping() or (coordinator.busy() and time.monotonic() < self._stop_at):
            coordinator.wait(max(0.0, min(self._stop_at - time.monotonic(), longest)))
            coordinator.act()

    def _stopping(self) -> bool:
        """Whether the worker is to stop; if so, the handlers are told."""
        event = self.settings.stop
        if math.isinf(self._stop_at) and event is not None and event.is_set():
            self.stop()
        if math.isinf(self._stop_at):
            return False
        for run in self._flight.all():
            run.signal.tell("shutdown")
        return True

    def _fail(self, error: BaseException) -> None:
        """An internal thread cannot go on: stop, and say so. In a queue that is gone no run can be settled any more."""
        self._failure = self._failure or error
        self.stop(0 if isinstance(error, SchemaError) else None)

    def _patience(self) -> float:
        # Asked again and again by every call that waits, so that a hanging database keeps no stop from the handlers.
        self._stopping()
        # A stop that has no handler to wait for has only the grace time.
        end = self._stop_at if len(self._flight) > 0 else self._stop_asked_at
        return min(CALL_SECONDS, end + GRACE - time.monotonic())

    def _parts(self) -> Parts:
        return Parts(
            self.id,
            self.name,
            self.settings,
            self.queue.store,
            self.queue.registry,
            self.queue.telemetry,
            self._state,
            self._flight,
            self._inbox,
            stopping=self._stopping,
            patience=self._patience,
            failed=self._fail,
        )

    @contextmanager
    def _signals(self) -> Generator[None]:
        """SIGTERM and SIGINT as an orderly stop, a second one as an immediate stop; on the main thread only."""

        def handle(number: int, frame: types.FrameType | None) -> None:
            self.stop(None if math.isinf(self._stop_at) else 0)

        previous = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                # None stands for a handler that is none of Python's, which cannot be put back from here.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _stop_all() -> None:
    """Stop every worker in order when the main thread has ended."""
    _ending.set()
    # A copy, made in one step: the workers leave it on threads of their own.
    workers = [worker for worker in list(_running) if worker._is_here()]  # pyright: ignore[reportPrivateUsage]
    for worker in workers:
        worker.stop()
    for worker in workers:
        worker._done.wait(worker.settings.shutdown_timeout + 2 * GRACE)  # pyright: ignore[reportPrivateUsage]


# Before Python ends, it waits for the threads of every pool without asking any of them to end. What is registered after
# the pools, which the imports above have done, is called before that; `atexit` would be too late.
threading._register_atexit(_stop_all)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
