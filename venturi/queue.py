"""A queue: the verbs of producers and operators, and the door to its worker."""

from __future__ import annotations

import collections
import datetime as dt
import functools
import sys
import time
import typing as t
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence

from typing_extensions import TypeVar

from venturi import checks, codec
from venturi.context import Context
from venturi.errors import ConfigError, PayloadError
from venturi.ids import uuid7
from venturi.merging import Merging, Request
from venturi.outcome import Outcome
from venturi.registry import Handler, Registry
from venturi.store.connections import Connection
from venturi.store.looking import FINISHED, HISTORY
from venturi.store.producing import Producing
from venturi.store.store import Store
from venturi.task import TaskType, dedup_key, task_type
from venturi.telemetry import Telemetry
from venturi.values import Action, Entry, Job, Priority, Receipt, Report, Stats, Status

if t.TYPE_CHECKING:
    from venturi.worker import Worker, WorkOptions

__all__ = ["Queue"]

T = TypeVar("T")
C = TypeVar("C", default=None)
S = TypeVar("S", default=None)
R = TypeVar("R")

_STATUSES = t.get_args(Status)


class _Register(t.Protocol[R]):
    @t.overload
    def __call__(self, fn: Callable[[T], Outcome], /) -> Handler[T]: ...
    @t.overload
    def __call__(self, fn: Callable[[T, Context[C, R]], Outcome], /) -> Handler[T]: ...


class Queue(t.Generic[S]):
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
            dead_on: Exception types that can never succeed: they end the job dead at once. Default: none.

        Raises:
            ConfigError: The signature, the annotation or an option is wrong.
            DuplicateKindError: The queue has another handler for the kind.
        """
        if fn is None:
            return functools.partial(self._register, **options)
        return self._register(fn, **options)

    def _register(self, fn: t.Any, **options: t.Any) -> Handler[t.Any]:
        known: object = fn
        made: Handler[t.Any] = fn if isinstance(known, Handler) and not options else Handler(fn, **options)
        self.registry.add(made)
        return made

    # --- Producers

    def enqueue(
        self,
        task: object,
        /,
        *,
        conn: Connection | None = None,
        delay: dt.timedelta | None = None,
        at: dt.datetime | None = None,
        priority: Priority | None = None,
        notify: bool | None = None,
    ) -> Receipt:
        """Enqueue a task, or merge it into the pending job of its dedup key.

        Args:
            task: An instance of a class decorated with ``@venturi.task``.
            conn: Enqueue inside this connection's transaction: the job exists if and only if it commits. Default:
                None, a short transaction of its own.
            delay: Due that long after the database's now; zero or negative is now. Default: None, now.
            at: Due at this aware instant; a past one is now. Default: None.
            priority: Default: None, the task's.
            notify: False does not wake a parked worker. Default: None, as the queue.

        Raises:
            PayloadError: Task or key cannot be stored; nothing was sent.
            ConfigError: An option is wrong; nothing was sent.
            SchemaError: The queue was never migrated.
            TypeError: ``task`` is no task, or an option is of the wrong type; nothing was sent.
        """
        due = _due(at, delay)
        producing = self._producing(notify)
        type_ = _type(task)
        with self.telemetry.producing(type_.kind) as trace:
            started = time.monotonic()
            self.registry.know(type_)
            request = _request(task, type_, priority, trace)
            if request.key is None:
                job = request.job(uuid7())
                with self.store.borrowed(conn) as connection:
                    producing.insert(connection, job, *due)
                receipt = Receipt(job.id, "inserted")
            else:
                receipt = self._store([request], conn, due, producing)[0]
        self._enqueued({(type_.kind, receipt.action): 1}, started, local=conn is None)
        return receipt

    def enqueue_many(
        self,
        tasks: Iterable[object],
        /,
        *,
        conn: Connection | None = None,
        delay: dt.timedelta | None = None,
        at: dt.datetime | None = None,
        priority: Priority | None = None,
        notify: bool | None = None,
    ) -> list[Receipt]:
        """Enqueue many tasks, of any kinds, in one transaction: all of them or none.

        It leaves what enqueuing them one by one would leave, and gives a receipt for each, in order. An empty
        sequence sends nothing. The options are those of `enqueue` and hold for all; a PayloadError has the position
        in ``index``.
        """
        due = _due(at, delay)
        producing = self._producing(notify)
        given = list(tasks)
        if not given:
            return []
        with self.telemetry.producing(_type(given[0]).kind) as trace:
            started = time.monotonic()
            requests = self._requests(given, priority, trace)
            receipts = self._store(requests, conn, due, producing)
        done: collections.Counter[tuple[str, Action]] = collections.Counter(
            (request.kind, receipt.action) for request, receipt in zip(requests, receipts, strict=True)
        )
        self._enqueued(done, started, local=conn is None)
        return receipts

    def _requests(self, tasks: Iterable[object], priority: Priority | None, trace: str | None) -> list[Request]:
        made: list[Request] = []
        types: dict[type, TaskType] = {}
        try:
            for task in tasks:
                type_ = types.get(type(task))
                if type_ is None:
                    type_ = types[type(task)] = _type(task)
                    self.registry.know(type_)
                made.append(_request(task, type_, priority, trace, len(made)))
        except PayloadError as error:
            raise PayloadError(error.problem, path=error.path, index=len(made)) from error
        return made

    def _store(
        self,
        requests: Sequence[Request],
        conn: Connection | None,
        due: tuple[dt.datetime | None, dt.timedelta],
        producing: Producing,
    ) -> list[Receipt]:
        keyed = any(request.key is not None for request in requests)
        with self.store.transaction(conn, pipeline=keyed) as connection:
            merging = Merging(
                producing,
                connection,
                lambda id_: self.store.looking.journal(connection, id_, HISTORY),
                *due,
            )
            return merging.store(requests)

    def _producing(self, notify: bool | None) -> Producing:
        return self.store.producing(None if notify is None else checks.flag("notify", notify))

    def _enqueued(self, done: Mapping[tuple[str, Action], int], started: float, *, local: bool) -> None:
        """Report how many tasks of each kind came to what."""
        telemetry = self.telemetry
        for (kind, action), number in done.items():
            if action == "inserted":
                telemetry.count("messaging.client.sent.messages", number, venturi__kind=kind)
            else:
                telemetry.count("venturi.merged", number, venturi__kind=kind, venturi__action=action)
        telemetry.record(
            "messaging.client.operation.duration",
            time.monotonic() - started,
            messaging__operation__type="send",
            venturi__kind=next(iter(done))[0],
        )
        if local:
            self.store.local.wake()

    # --- Operators

    def job(self, id: uuid.UUID, /, *, conn: Connection | None = None) -> Job | None:
        """One job as it stands; None when the id is unknown."""
        with self.store.borrowed(conn) as connection:
            return self.store.looking.job(connection, _id(id))

    def jobs(
        self,
        *,
        kind: str | None = None,
        status: Status | None = None,
        before: uuid.UUID | None = None,
        finished_since: dt.datetime | None = None,
        finished_until: dt.datetime | None = None,
        limit: int = 100,
        conn: Connection | None = None,
    ) -> list[Job]:
        """A page of jobs, newest first by id.

        Args:
            kind: Only this kind, with its aliases where this queue knows them. Default: None, all.
            status: Only this status. Default: None, all.
            before: Only ids before this one: the last of the page before. Default: None, from the newest.
            finished_since: Only jobs that finished then or later; leaves out unfinished ones. Default: None.
            finished_until: Only jobs that finished before; leaves out unfinished ones. Default: None.
            limit: Most jobs to give, 1 to 1000. Default: 100.

        Raises:
            ConfigError: An option is out of its bounds, or a datetime is naive.
        """
        if status is not None and status not in _STATUSES:
            raise ConfigError(f"status={status!r}: must be one of {', '.join(_STATUSES)}")
        since = None if finished_since is None else checks.instant("finished_since", finished_since)
        until = None if finished_until is None else checks.instant("finished_until", finished_until)
        number = checks.whole("limit", limit, 1, 1000)
        kinds = self._kinds(kind)
        with self.store.borrowed(conn) as connection:
            return self.store.looking.jobs(
                connection,
                kinds=kinds,
                status=status,
                before=None if before is None else _id(before),
                since=since,
                until=until,
                limit=number,
            )

    def journal(self, id: uuid.UUID, /, *, conn: Connection | None = None) -> list[Entry]:
        """Everything recorded of a job, oldest first; an empty list when the id is unknown."""
        with self.store.borrowed(conn) as connection:
            return self.store.looking.journal(connection, _id(id))

    def stats(self, *, conn: Connection | None = None) -> Stats:
        """How many jobs of each kind are ready, scheduled, claimed and dead, in one consistent snapshot."""
        with self.store.borrowed(conn) as connection:
            return self.store.looking.stats(connection)

    def cancel(self, id: uuid.UUID, /, *, conn: Connection | None = None) -> bool:
        """Cancel a job: a pending one never runs, the run of a claimed one is told to stop.

        Returns:
            False when the job is finished or unknown; nothing changes then.
        """
        with self.store.transaction(conn) as connection:
            return self.store.looking.cancel(connection, _id(id), notify=self.store.notify)

    def requeue(self, id: uuid.UUID, /, *, delay: dt.timedelta | None = None, conn: Connection | None = None) -> bool:
        """Send a dead job back: same id, payload, priority, key and carry, no failures.

        Args:
            delay: Due that long from now; zero or negative is now. Default: None, now.

        Returns:
            False when the job is not dead; nothing changes then.
        """
        return self._requeue(_id(id), None, 1, delay, conn) == 1

    def requeue_many(
        self,
        *,
        kind: str | None = None,
        limit: int = 1000,
        delay: dt.timedelta | None = None,
        conn: Connection | None = None,
    ) -> int:
        """Send dead jobs back, the longest dead first.

        Args:
            kind: Only this kind. Default: None, all.
            limit: Most jobs to send back, at least 1. Default: 1000.
            delay: Due that long from now. Default: None, now.

        Returns:
            How many.
        """
        return self._requeue(None, self._kinds(kind), checks.whole("limit", limit, 1, sys.maxsize), delay, conn)

    def _requeue(
        self,
        id: uuid.UUID | None,
        kinds: Sequence[str] | None,
        limit: int,
        delay: dt.timedelta | None,
        conn: Connection | None,
    ) -> int:
        wait = _due(None, delay)[1]
        with self.store.transaction(conn) as connection:
            number = self.store.looking.requeue(connection, id=id, kinds=kinds, limit=limit, delay=wait)
        if conn is None and number:
            self.store.local.wake()
        return number

    def cleanup(self, *, finished_before: dt.datetime, kind: str | None = None, status: Status | None = None) -> int:
        """Delete finished jobs with all their journal entries, oldest first, in transactions of at most 1000 jobs each.

        Args:
            finished_before: Only jobs that finished strictly before this aware instant.
            kind: Only this kind. Default: None, all.
            status: Only ``completed``, ``dead`` or ``cancelled`` jobs. Default: None, all three.

        Returns:
            How many jobs were deleted.

        Raises:
            ConfigError: The instant is naive, or the status is not one of finished jobs.
        """
        if status is not None and status not in tuple(FINISHED):
            raise ConfigError(f"status={status!r}: must be one of {', '.join(FINISHED)}")
        before = checks.instant("finished_before", finished_before)
        statuses = list(FINISHED) if status is None else [status]
        kinds = self._kinds(kind)
        deleted = 0
        while True:
            with self.store.borrowed(None) as connection:
                batch = self.store.looking.cleanup(connection, finished_before=before, kinds=kinds, statuses=statuses)
            deleted += batch
            if batch == 0:
                return deleted

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
    def work(self, *, state: S, block: t.Literal[True] = ..., **options: t.Unpack[WorkOptions]) -> Report: ...
    @t.overload
    def work(self, *, state: S, block: t.Literal[False], **options: t.Unpack[WorkOptions]) -> Worker: ...
    def work(self, *, state: t.Any = None, block: bool = True, **options: t.Unpack[WorkOptions]) -> t.Any:
        """Run the queue's jobs with its handlers until told to stop.

        On the main thread SIGTERM and SIGINT stop it in order, a second one at once; elsewhere signals are not touched.

        Args:
            state: Given to every handler as ``ctx.state``. Default: None.
            block: Whether to return only when the worker has stopped. False gives the running worker, which stops when
                its ``with`` block ends. Default: True.
            options: See `WorkOptions`.

        Returns:
            The worker's report, or the running worker.

        Raises:
            ConfigError: An option is out of its bounds, or the queue has no handlers.
            SchemaError: The schema is missing or does not fit this version.
        """
        from venturi.worker import Worker

        worker = Worker(self, state=state, **options)
        return worker.run() if block else worker.start()

    def _kinds(self, kind: str | None) -> tuple[str, ...] | None:
        return None if kind is None else self.registry.names(checks.kind("kind", kind))


def _id(value: object) -> uuid.UUID:
    if not isinstance(value, uuid.UUID):
        raise TypeError(f"a job's id must be a uuid.UUID, not {type(value).__name__}")
    return value


def _type(task: object) -> TaskType:
    if isinstance(task, type):
        raise TypeError(f"enqueue takes an instance of {task.__qualname__}, not the class")
    return task_type(type(task))


def _request(
    task: object, type_: TaskType, priority: Priority | None, trace: str | None, index: int | None = None
) -> Request:
    wanted = type_.priority if priority is None else checks.priority("priority", priority)
    return Request(task, type_, codec.encode(task, type_.cls), wanted, dedup_key(task), trace, index)


def _due(at: dt.datetime | None, delay: dt.timedelta | None) -> tuple[dt.datetime | None, dt.timedelta]:
    if at is not None and delay is not None:
        raise ConfigError("at= and delay= say the same thing twice: give one of them")
    instant = None if at is None else checks.instant("at", at)
    wait = dt.timedelta(0) if delay is None else checks.delay("delay", delay)
    return instant, min(max(wait, dt.timedelta(0)), dt.timedelta(days=3_000_000))
