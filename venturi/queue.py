"""A queue: its settings and handlers, the verbs of producers and operators, and the door to its worker."""

from __future__ import annotations

import functools
import typing as t
from collections.abc import Callable

from typing_extensions import TypeVar

from venturi import checks
from venturi.context import Context
from venturi.enqueuing import Enqueuing
from venturi.errors import ConfigError
from venturi.operating import Operating
from venturi.outcome import Outcome
from venturi.registry import Handler, Registry
from venturi.store.store import Store
from venturi.telemetry import Telemetry
from venturi.values import Report

if t.TYPE_CHECKING:
    from venturi.worker import Worker, WorkOptions

__all__ = ["Queue"]

_HANDLER_OPTIONS = ("task", "cap", "dead_on")

T = TypeVar("T")
C = TypeVar("C", default=None)
S = TypeVar("S", default=None)
R = TypeVar("R")


class _Register(t.Protocol[R]):
    @t.overload
    def __call__(self, fn: Callable[[T], Outcome], /) -> Handler[T]: ...
    @t.overload
    def __call__(self, fn: Callable[[T, Context[C, R]], Outcome], /) -> Handler[T]: ...


class Queue(Enqueuing, Operating, t.Generic[S]):
    """One schema in one database, and the handlers of its jobs.

    Nothing is opened here: the first connection is made at the first use, in the process that uses it.

    Args:
        schema: Its name, 1 to 63 bytes. Default: ``venturi``.
        dsn: Connection string. Default: None, the first that is set of VENTURI_DATABASE_URL, DATABASE_URL and libpq's
            PG* variables.
        pool_size: Most connections that producers open at once, at least 1. Default: 10.
        listen_dsn: Where workers listen for wake-ups, when ``dsn`` leads through a pooler. Default: None, as ``dsn``;
            without it a worker behind a pooler polls.
        notify: Whether enqueues wake parked workers; False leaves it to their polling. Default: True.
        pooler: Whether ``dsn`` leads through a transaction pooler: no prepared statements and no session state.
            Default: False.

    Raises:
        ConfigError: An option is out of its bounds.
    """

    def __init__(
        self,
        schema: str = "venturi",
        *,
        dsn: str | None = None,
        pool_size: int = 10,
        listen_dsn: str | None = None,
        notify: bool = True,
        pooler: bool = False,
    ) -> None:
        self.schema: str = checks.schema(schema)
        self.registry: Registry = Registry()
        self.telemetry: Telemetry = Telemetry(self.schema)
        self.store: Store = Store(
            self.schema,
            dsn=dsn,
            pool_size=checks.whole("pool_size", pool_size, 1),
            listen_dsn=listen_dsn,
            notify=checks.flag("notify", notify),
            pooler=checks.flag("pooler", pooler),
        )

    def __repr__(self) -> str:
        return f"<venturi.Queue {self.schema!r}>"

    # --- Handlers

    @t.overload
    def handler(
        self, /, *, task: type[t.Any] | None = ..., cap: int | None = ..., dead_on: tuple[type[Exception], ...] = ...
    ) -> _Register[S]: ...
    @t.overload
    def handler(self, fn: Callable[[T], Outcome], /) -> Handler[T]: ...
    @t.overload
    def handler(self, fn: Callable[[T, Context[C, S]], Outcome], /) -> Handler[T]: ...
    def handler(self, fn: t.Any = None, /, **options: t.Any) -> t.Any:
        """Register a function of ``(task)`` or ``(task, ctx)`` as the handler of its first parameter's task class.

        The function stays callable as it was. Use as ``@queue.handler`` or with options:

        Args:
            task: The task class. Default: None, read from the annotation when a worker starts.
            cap: Most runs of this kind at once in one worker, at least 1. Default: None, no limit but the slots.
            dead_on: A tuple of exception types that end the job dead at once, as no retry can help. Default: (), none.

        Raises:
            ConfigError: The signature, the annotation or an option is wrong or unknown, or the function is here already
                with other options.
            DuplicateKindError: The queue has another handler for the kind.
        """
        unknown = [name for name in options if name not in _HANDLER_OPTIONS]
        if unknown:
            raise ConfigError(f"handler() has no option {unknown[0]!r}, only {', '.join(_HANDLER_OPTIONS)}")
        if fn is None:
            return functools.partial(self._register, **options)
        return self._register(fn, **options)

    def _register(self, fn: t.Any, **options: t.Any) -> Handler[t.Any]:
        known: object = fn
        made: Handler[t.Any] = fn if isinstance(known, Handler) and not options else Handler(fn, **options)
        self.registry.add(made)
        return made

    # --- The schema and the connections

    def migrate(self) -> list[str]:
        """Create or update the queue's schema; safe to call from many processes at once.

        Returns:
            The names of the migrations that were applied; empty when it was up to date.

        Raises:
            SchemaError: The records of earlier migrations do not fit.
        """
        return self.store.migrate()

    def close(self) -> None:
        """Close the producers' connections; the next use opens new ones. Running workers are not touched."""
        self.store.close()

    # --- Worker

    @t.overload
    def work(self: Queue[None], *, block: t.Literal[True] = ..., **options: t.Unpack[WorkOptions]) -> Report: ...
    @t.overload
    def work(self: Queue[None], *, block: t.Literal[False], **options: t.Unpack[WorkOptions]) -> Worker: ...
    @t.overload
    def work(self: Queue[None], *, block: bool, **options: t.Unpack[WorkOptions]) -> Report | Worker: ...
    @t.overload
    def work(self, *, state: S, block: t.Literal[True] = ..., **options: t.Unpack[WorkOptions]) -> Report: ...
    @t.overload
    def work(self, *, state: S, block: t.Literal[False], **options: t.Unpack[WorkOptions]) -> Worker: ...
    @t.overload
    def work(self, *, state: S, block: bool, **options: t.Unpack[WorkOptions]) -> Report | Worker: ...
    def work(self, *, state: t.Any = None, block: bool = True, **options: t.Unpack[WorkOptions]) -> t.Any:
        """Run the queue's jobs with its handlers until told to stop.

        On the main thread SIGTERM and SIGINT stop it in order, a second one at once. On other threads, and with
        ``block=False``, signals are not touched.

        Args:
            state: Given to every handler as ``ctx.state``. Default: None.
            block: Whether to return only when the worker has stopped. False gives the running worker, which stops when
                its ``with`` block ends. Default: True.
            options: Times in seconds or as timedeltas; bounds in `WorkOptions`. Defaults: ``concurrency`` half the
                cores, from 1 to 8, ``poll`` 30, ``lease`` 60, ``shutdown_timeout`` 30, ``backoff`` Backoff(1, 3600),
                ``jitter`` 0.5, ``backstop`` 25, ``priority_ratio`` 4, ``stop`` None and ``signals`` True.

        Returns:
            The worker's report, or the running worker.

        Raises:
            ConfigError: An option is out of its bounds, or the queue has no handlers.
            SchemaError: The schema is missing or does not fit this version.
        """
        from venturi.worker import Worker

        waits = checks.flag("block", block)
        worker = Worker(self, state=state, **options)
        return worker.run() if waits else worker.start()
