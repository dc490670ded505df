"""venturi: a durable job queue on PostgreSQL for synchronous Python."""

import typing

from venturi.backoff import Backoff
from venturi.context import Cancellation, Context, Pending, current_context
from venturi.errors import (
    Cancelled,
    ConfigError,
    DuplicateKindError,
    LeaseLost,
    PayloadError,
    PermanentError,
    RetryLater,
    SchemaError,
    UnknownKindError,
    VenturiError,
)
from venturi.outcome import Combine, Completed, Independent, Keep, Merge, Outcome, Pause, Replace
from venturi.queue import Queue
from venturi.registry import Handler
from venturi.task import task
from venturi.values import Entry, Job, KindStats, Priority, Receipt, Released, Report, Stats

__all__ = [
    "Backoff",
    "Cancellation",
    "Cancelled",
    "Combine",
    "Completed",
    "ConfigError",
    "Context",
    "DuplicateKindError",
    "Entry",
    "Handler",
    "Independent",
    "Job",
    "Keep",
    "KindStats",
    "LeaseLost",
    "Merge",
    "Outcome",
    "Pause",
    "PayloadError",
    "Pending",
    "PermanentError",
    "Priority",
    "Queue",
    "Receipt",
    "Released",
    "Replace",
    "Report",
    "RetryLater",
    "SchemaError",
    "Stats",
    "UnknownKindError",
    "VenturiError",
    "cancel",
    "current_context",
    "default",
    "enqueue",
    "enqueue_many",
    "handler",
    "job",
    "journal",
    "requeue",
    "stats",
    "task",
    "work",
]

default: Queue[typing.Any] = Queue()
"""The queue that the verbs of this module belong to: schema ``venturi``, settings from the environment."""

handler: typing.Final = default.handler
enqueue: typing.Final = default.enqueue
enqueue_many: typing.Final = default.enqueue_many
work: typing.Final = default.work
job: typing.Final = default.job
journal: typing.Final = default.journal
stats: typing.Final = default.stats
cancel: typing.Final = default.cancel
requeue: typing.Final = default.requeue
