"""The verbs of producers."""

from __future__ import annotations

import collections
import datetime as dt
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence

from venturi import checks, codec
from venturi.errors import ConfigError, PayloadError
from venturi.ids import uuid7
from venturi.merging import Merging, Request
from venturi.registry import Registry
from venturi.store.connections import Connection
from venturi.store.looking import HISTORY
from venturi.store.producing import Producing
from venturi.store.store import Store
from venturi.task import TaskType, dedup_key, task_type
from venturi.telemetry import Telemetry
from venturi.values import Action, Entry, Priority, Receipt

__all__ = ["Enqueuing", "wait"]


class Enqueuing:
    """What producers ask of a queue."""

    registry: Registry
    store: Store
    telemetry: Telemetry

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
            SchemaError: The queue was never migrated. With ``conn`` it is psycopg's own error.
            psycopg.Error: The database refused it, or no connection could be had within 10 s.
            TypeError: ``task`` is no task, or an option is of the wrong type; nothing was sent.
        """
        due = _due(at, delay)
        producing = self._producing(notify)
        type_ = _type(task)
        with self.telemetry.producing(type_.kind) as trace:
            started = time.monotonic()
            self.registry.know(type_)
            request = _request(task, type_, priority)
            if request.key is None:
                job = request.job(uuid7())
                with self.store.borrowed(conn) as connection:
                    producing.insert(connection, job, trace, *due)
                receipt = Receipt(job.id, "inserted")
            else:
                receipt = self._store([request], conn, trace, due, producing)[0]
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
            requests = self._requests(given, priority)
            receipts = self._store(requests, conn, trace, due, producing)
        done: collections.Counter[tuple[str, Action]] = collections.Counter(
            (request.kind, receipt.action) for request, receipt in zip(requests, receipts, strict=True)
        )
        self._enqueued(done, started, local=conn is None)
        return receipts

    def _requests(self, tasks: Iterable[object], priority: Priority | None) -> list[Request]:
        made: list[Request] = []
        types: dict[type, TaskType] = {}
        try:
            for task in tasks:
                type_ = types.get(type(task))
                if type_ is None:
                    type_ = types[type(task)] = _type(task)
                    self.registry.know(type_)
                made.append(_request(task, type_, priority, len(made)))
        except PayloadError as error:
            raise PayloadError(error.problem, path=error.path, index=len(made)) from error
        return made

    def _store(
        self,
        requests: Sequence[Request],
        conn: Connection | None,
        trace: str | None,
        due: tuple[dt.datetime | None, dt.timedelta],
        producing: Producing,
    ) -> list[Receipt]:
        with self.store.transaction(conn, pipeline=True) as connection:

            def history(job: uuid.UUID) -> list[Entry]:
                return self.store.looking.journal(connection, job, HISTORY)

            return Merging(producing, connection, history, trace, *due).store(requests)

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
            self.store.local.wake({kind for kind, _ in done})


def _type(task: object) -> TaskType:
    if isinstance(task, type):
        raise TypeError(f"enqueue takes an instance of {task.__qualname__}, not the class")
    return task_type(type(task))


def _request(task: object, type_: TaskType, priority: Priority | None, index: int | None = None) -> Request:
    wanted = type_.priority if priority is None else checks.priority("priority", priority)
    return Request(task, type_, codec.encode(task, type_.cls), wanted, dedup_key(task), index)


def _due(at: dt.datetime | None, delay: dt.timedelta | None) -> tuple[dt.datetime | None, dt.timedelta]:
    if at is not None and delay is not None:
        raise ConfigError("at= and delay= say the same thing twice: give one of them")
    instant = None if at is None else checks.instant("at", at)
    return instant, wait(delay)


def wait(delay: dt.timedelta | None) -> dt.timedelta:
    """The span that a ``delay`` option stands for, within what the database can add to its now."""
    span = dt.timedelta(0) if delay is None else checks.delay("delay", delay)
    return min(max(span, dt.timedelta(0)), dt.timedelta(days=3_000_000))
