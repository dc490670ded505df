"""Spans and metrics through the OpenTelemetry API; without an SDK they cost next to nothing and go nowhere.

Names follow the semantic conventions for messaging; the queue's schema is the destination. Whatever the telemetry
does, a raising tracer included, it never changes the outcome of an enqueue or a run.

=========================================  =========  =====================================================
name                                       kind       recorded
=========================================  =========  =====================================================
``send <kind>``                            span       an enqueue; its context is stored with the job
``process <kind>``                         span       a run; linked to the enqueue's span, not its child
``messaging.client.sent.messages``         counter    jobs enqueued
``messaging.client.consumed.messages``     counter    jobs claimed
``messaging.client.operation.duration``    histogram  seconds that an enqueue or a settle-and-claim took
``messaging.process.duration``             histogram  seconds that a handler ran
``venturi.claim.latency``                  histogram  seconds from due to claimed, on the database's clock
``venturi.settled``                        counter    ends of runs that are stored, by outcome
``venturi.merged``                         counter    enqueues merged into a pending job, by action
``venturi.recovered``                      counter    claims taken back from workers that were gone
``venturi.released``                       counter    claims given back by a stopping worker
``venturi.lost_claims``                    counter    ends of runs that were refused
``venturi.settle_errors``                  counter    turns that failed and were tried again
``venturi.listener.reconnects``            counter    listening sessions opened again
=========================================  =========  =====================================================
"""

from __future__ import annotations

import json
import logging
import typing as t
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version

from opentelemetry import context as otel_context
from opentelemetry import metrics, propagate, trace

__all__ = ["Telemetry"]

logger: logging.Logger = logging.getLogger("venturi.telemetry")

Attributes: t.TypeAlias = dict[str, str | int]

_COUNTERS = (
    "messaging.client.sent.messages",
    "messaging.client.consumed.messages",
    "venturi.settled",
    "venturi.merged",
    "venturi.recovered",
    "venturi.released",
    "venturi.lost_claims",
    "venturi.settle_errors",
    "venturi.listener.reconnects",
)
_HISTOGRAMS = ("messaging.client.operation.duration", "messaging.process.duration", "venturi.claim.latency")


class Telemetry:
    """The instruments of one queue.

    Args:
        destination: The queue's schema.
    """

    def __init__(self, destination: str) -> None:
        self._common: Attributes = {"messaging.system": "venturi", "messaging.destination.name": destination}
        self._instruments: dict[str, t.Any] = {}
        self._tracer: trace.Tracer | None = None

    def count(self, name: str, amount: int = 1, **attributes: str | int) -> None:
        """Raise a counter."""
        if amount:
            self._guard(lambda: self._instrument(name).add(amount, self._with(attributes)))

    def record(self, name: str, seconds: float, **attributes: str | int) -> None:
        """Record a duration."""
        self._guard(lambda: self._instrument(name).record(seconds, self._with(attributes)))

    @contextmanager
    def producing(self, kind: str) -> Generator[str | None]:
        """A producer span around an enqueue; gives the JSON text of its context, None when it is not traced."""
        span = self._start(
            f"send {kind}", trace.SpanKind.PRODUCER, {"messaging.operation.type": "send", "venturi.kind": kind}
        )
        try:
            yield self._headers(span)
        except BaseException as error:
            self._fail(span, error)
            raise
        finally:
            self._end(span)

    @contextmanager
    def processing(self, kind: str, job: str, run: int, headers: str | None) -> Generator[Callable[[str], None]]:
        """A consumer span around a run, linked to the enqueue; gives a function that says how the run ended."""
        attributes: Attributes = {
            "messaging.operation.type": "process",
            "messaging.message.id": job,
            "venturi.kind": kind,
            "venturi.run": run,
        }
        span = self._start(f"process {kind}", trace.SpanKind.CONSUMER, attributes, self._links(headers))
        token: t.Any = None
        with suppress(Exception):
            token = otel_context.attach(trace.set_span_in_context(span)) if span is not None else None
        try:
            yield lambda outcome: self._outcome(span, outcome)
        finally:
            if token is not None:
                with suppress(Exception):
                    otel_context.detach(token)
            self._end(span)

    def _with(self, attributes: Attributes) -> Attributes:
        return {**self._common, **{name.replace("__", "."): value for name, value in attributes.items()}}

    def _instrument(self, name: str) -> t.Any:
        if not self._instruments:
            meter = metrics.get_meter("venturi", _version())
            counters = {each: meter.create_counter(each) for each in _COUNTERS}
            self._instruments = counters | {each: meter.create_histogram(each, unit="s") for each in _HISTOGRAMS}
        return self._instruments[name]

    def _start(
        self, name: str, kind: trace.SpanKind, attributes: Attributes, links: list[trace.Link] | None = None
    ) -> trace.Span | None:
        try:
            if self._tracer is None:
                self._tracer = trace.get_tracer("venturi", _version())
            return self._tracer.start_span(name, kind=kind, attributes=self._with(attributes), links=links)
        except Exception:
            logger.debug("a span could not be started", exc_info=True)
            return None

    def _headers(self, span: trace.Span | None) -> str | None:
        if span is None:
            return None
        headers: dict[str, str] = {}
        with suppress(Exception):
            if span.get_span_context().is_valid:
                propagate.inject(headers, trace.set_span_in_context(span))
        return json.dumps(headers) if headers else None

    def _links(self, headers: str | None) -> list[trace.Link]:
        if headers is None:
            return []
        with suppress(Exception):
            remote = trace.get_current_span(propagate.extract(json.loads(headers))).get_span_context()
            return [trace.Link(remote)] if remote.is_valid else []
        return []

    def _outcome(self, span: trace.Span | None, outcome: str) -> None:
        if span is not None:
            with suppress(Exception):
                span.set_attribute("venturi.outcome", outcome)
                if outcome in ("retried", "dead"):
                    span.set_status(trace.StatusCode.ERROR)

    def _fail(self, span: trace.Span | None, error: BaseException) -> None:
        if span is not None:
            with suppress(Exception):
                # The type alone: an error's text may quote the payload.
                span.set_attribute("error.type", type(error).__qualname__)
                span.set_status(trace.StatusCode.ERROR)

    def _end(self, span: trace.Span | None) -> None:
        if span is not None:
            with suppress(Exception):
                span.end()

    def _guard(self, emit: Callable[[], None]) -> None:
        try:
            emit()
        except Exception:
            logger.debug("a measurement could not be recorded", exc_info=True)


def _version() -> str:
    try:
        return version("venturi-queue")
    except PackageNotFoundError:
        return "0"
