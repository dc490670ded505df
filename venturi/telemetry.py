"""Spans and metrics through the OpenTelemetry API; without an SDK they cost next to nothing and go nowhere.

Names follow the semantic conventions for messaging; the queue's schema is the destination. Whatever the telemetry
does, a raising tracer included, it never changes the outcome of an enqueue or a run. Counters follow the commit, but
for enqueues in a caller's transaction, whose end is not seen. The gauges are read from one snapshot of the queue per
collection, by processes with a running worker.

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
``venturi.queue.depth``                    gauge      jobs by kind and state: ready, scheduled, claimed, dead
``venturi.queue.oldest_ready_age``         gauge      seconds since the oldest ready job of a kind became due
=========================================  =========  =====================================================
"""

from __future__ import annotations

import functools
import json
import threading
import time
import typing as t
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib import metadata

from opentelemetry import context as otel_context
from opentelemetry import metrics, propagate, trace

from venturi.log import Log, log
from venturi.text import note
from venturi.values import KindStats, Stats

__all__ = ["Telemetry", "version"]

logger: Log = log("venturi.telemetry")

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
SNAPSHOT_SECONDS = 0.5
"""Age up to which a snapshot serves the other gauge of the same collection too."""

LOOK_SECONDS = 1.0
_UNTRACED: AbstractContextManager[Callable[[str], None]] = nullcontext(lambda outcome: None)

_HISTOGRAMS = ("messaging.client.operation.duration", "messaging.process.duration", "venturi.claim.latency")


class Telemetry:
    """The instruments of one queue.

    Args:
        destination: The queue's schema.
    """

    def __init__(self, destination: str) -> None:
        self._common: Attributes = {"messaging.system": "venturi", "messaging.destination.name": destination}
        self._instruments: dict[str, t.Any] = {}
        self._known: dict[tuple[tuple[str, str | int], ...], Attributes] = {}
        self._tracer: trace.Tracer | None = None  # once there is an SDK
        self._look_at = 0.0
        self._gauges: _Gauges | None = None

    def count(self, name: str, amount: int = 1, **attributes: str | int) -> None:
        """Raise a counter."""
        if amount:
            try:
                self._instrument(name).add(amount, self._with(attributes))
            except Exception:
                logger.debug("a measurement could not be recorded", exc_info=True)

    def record(self, name: str, *seconds: float, **attributes: str | int) -> None:
        """Record durations."""
        try:
            known, record = self._with(attributes), self._instrument(name).record
            for duration in seconds:
                record(duration, known)
        except Exception:
            logger.debug("a measurement could not be recorded", exc_info=True)

    def observe(self, snapshot: Callable[[], Stats]) -> None:
        """Report the queue's depth and age from such snapshots, until `unobserve` was called as often."""
        if self._gauges is None:
            self._gauges = _Gauges(self._common)
            with suppress(Exception):
                self._gauges.register()
        self._gauges.sources.append(snapshot)

    def unobserve(self, snapshot: Callable[[], Stats]) -> None:
        """Take no more snapshots from here."""
        if self._gauges is not None:
            self._gauges.sources.remove(snapshot)

    def producing(self, kind: str) -> AbstractContextManager[str | None]:
        """A producer span around an enqueue; gives the JSON text of its context, None when it is not traced.

        Without an SDK there is no span, and the caller's own context is handed on.
        """
        return self._send(kind) if self._is_traced() else nullcontext(self._headers(trace.get_current_span()))

    @contextmanager
    def _send(self, kind: str) -> Generator[str | None]:
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

    def processing(
        self, kind: str, job: str, run: int, headers: str | None
    ) -> AbstractContextManager[Callable[[str], None]]:
        """A consumer span around a run, linked to the enqueue; gives a function that says how the run ended."""
        return self._process(kind, job, run, headers) if self._is_traced() else _UNTRACED

    def _is_traced(self) -> bool:
        """Whether spans go anywhere; looked up once a second, since to ask costs more than all else without an SDK."""
        if self._tracer is None and (now := time.monotonic()) >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            with suppress(Exception):
                found = trace.get_tracer("venturi", version())
                self._tracer = None if isinstance(found, trace.ProxyTracer) else found
        return self._tracer is not None

    @contextmanager
    def _process(self, kind: str, job: str, run: int, headers: str | None) -> Generator[Callable[[str], None]]:
        attributes: Attributes = {
            "messaging.operation.type": "process",
            "messaging.message.id": job,
            "venturi.kind": kind,
            "venturi.run": run,
        }
        span = self._start(f"process {kind}", trace.SpanKind.CONSUMER, attributes, self._links(headers))
        token: t.Any = None
        with suppress(Exception):
            if span.get_span_context().is_valid:
                token = otel_context.attach(trace.set_span_in_context(span))
        try:
            yield lambda outcome: self._outcome(span, outcome)
        finally:
            if token is not None:
                with suppress(Exception):
                    otel_context.detach(token)
            self._end(span)

    def _with(self, attributes: Attributes) -> Attributes:
        """The attributes under their real names, with the common ones; made once for each combination of metrics."""
        key = tuple(attributes.items())
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._named(attributes)
        return known

    def _named(self, attributes: Attributes) -> Attributes:
        return {**self._common, **{name.replace("__", "."): value for name, value in attributes.items()}}

    def _instrument(self, name: str) -> t.Any:
        if not self._instruments:
            meter = metrics.get_meter("venturi", version())
            counters = {each: meter.create_counter(each) for each in _COUNTERS}
            self._instruments = counters | {each: meter.create_histogram(each, unit="s") for each in _HISTOGRAMS}
        return self._instruments[name]

    def _start(
        self, name: str, kind: trace.SpanKind, attributes: Attributes, links: list[trace.Link] | None = None
    ) -> trace.Span:
        try:
            tracer = t.cast(trace.Tracer, self._tracer)
            return tracer.start_span(name, kind=kind, attributes=self._named(attributes), links=links)
        except Exception:
            logger.debug("a span could not be started", exc_info=True)
            return trace.INVALID_SPAN

    def _headers(self, span: trace.Span) -> str | None:
        headers: dict[str, str] = {}
        with suppress(Exception):
            if span.get_span_context().is_valid:
                propagate.inject(headers, trace.set_span_in_context(span))
                if headers:
                    # A propagator of the program's may write anything: what is no text to store would fail the enqueue.
                    return json.dumps({note(name): note(value) for name, value in headers.items()})
        return None

    def _links(self, headers: str | None) -> list[trace.Link]:
        if headers is None:
            return []
        with suppress(Exception):
            remote = trace.get_current_span(propagate.extract(json.loads(headers))).get_span_context()
            return [trace.Link(remote)] if remote.is_valid else []
        return []

    def _outcome(self, span: trace.Span, outcome: str) -> None:
        with suppress(Exception):
            span.set_attribute("venturi.outcome", outcome)
            if outcome in ("retried", "dead"):
                span.set_status(trace.StatusCode.ERROR)

    def _fail(self, span: trace.Span, error: BaseException) -> None:
        with suppress(Exception):
            # The type alone: an error's text may quote the payload.
            span.set_attribute("error.type", type(error).__qualname__)
            span.set_status(trace.StatusCode.ERROR)

    def _end(self, span: trace.Span) -> None:
        with suppress(Exception):
            span.end()


class _Gauges:
    """Depth and age of one queue, read when an SDK collects.

    Attributes:
        sources: Where a snapshot can be had; none means that nothing is reported.
    """

    def __init__(self, common: Attributes) -> None:
        self.sources: list[Callable[[], Stats]] = []
        self._common = common
        self._lock = threading.Lock()
        self._taken_at = 0.0
        self._latest: Stats | None = None

    def register(self) -> None:
        """Make the instruments; the API has no way to take them back."""
        meter = metrics.get_meter("venturi", version())
        meter.create_observable_gauge("venturi.queue.depth", [self._depth])
        meter.create_observable_gauge("venturi.queue.oldest_ready_age", [self._age], unit="s")

    def _depth(self, _: metrics.CallbackOptions) -> Iterator[metrics.Observation]:
        for kind, counts in self._kinds():
            for state in ("ready", "scheduled", "claimed", "dead"):
                attributes = {**self._common, "venturi.kind": kind, "venturi.state": state}
                yield metrics.Observation(getattr(counts, state), attributes)

    def _age(self, _: metrics.CallbackOptions) -> Iterator[metrics.Observation]:
        for kind, counts in self._kinds():
            if counts.oldest_ready is not None:
                attributes = {**self._common, "venturi.kind": kind}
                yield metrics.Observation(counts.oldest_ready.total_seconds(), attributes)

    def _kinds(self) -> list[tuple[str, KindStats]]:
        """The counts of one snapshot, which both gauges of a collection share."""
        with self._lock:
            if time.monotonic() - self._taken_at > SNAPSHOT_SECONDS:
                self._latest = self._take()
                self._taken_at = time.monotonic()
            return [] if self._latest is None else list(self._latest.kinds.items())

    def _take(self) -> Stats | None:
        try:
            return self.sources[0]() if self.sources else None
        except Exception:
            logger.debug("no snapshot for the gauges", exc_info=True)
            return None


@functools.cache
def version() -> str:
    """The version of this library, as installed; 0 where it is not."""
    try:
        return metadata.version("venturi-queue")
    except metadata.PackageNotFoundError:
        return "0"
