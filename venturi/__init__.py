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
    Reason,
    RetryLater,
    SchemaError,
    UnknownKindError,
    VenturiError,
)
from venturi.outcome import Combine, Completed, Independent, Keep, Merge, Outcome, Pause, Replace
from venturi.queue import Queue
from venturi.registry import Handler
from venturi.task import task
from venturi.values import (
    Action,
    Entry,
    Job,
    JournalOutcome,
    KindStats,
    Priority,
    Receipt,
    Released,
    Report,
    Stats,
    Status,
)
from venturi.worker import Worker, WorkOptions

__all__ = [
    "Action",
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
    "JournalOutcome",
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
    "Reason",
    "Receipt",
    "Released",
    "Replace",
    "Report",
    "RetryLater",
    "SchemaError",
    "Stats",
    "Status",
    "UnknownKindError",
    "VenturiError",
    "WorkOptions",
    "Worker",
    "cancel",
    "cleanup",
    "current_context",
    "default",
    "enqueue",
    "enqueue_many",
    "handler",
    "job",
    "jobs",
    "journal",
    "migrate",
    "requeue",
    "requeue_many",
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
jobs: typing.Final = default.jobs
journal: typing.Final = default.journal
stats: typing.Final = default.stats
cancel: typing.Final = default.cancel
requeue: typing.Final = default.requeue
requeue_many: typing.Final = default.requeue_many
cleanup: typing.Final = default.cleanup
migrate: typing.Final = default.migrate
