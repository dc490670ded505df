"""Metrics and spans, as an OpenTelemetry SDK in the user's program sees them."""

from __future__ import annotations

import collections.abc as cabc
import datetime as dt
import threading
import typing as t

import psycopg
import pytest
from fixtures.program import Programs
from fixtures.sqltext import on
from fixtures.waiting import eventually
from fixtures.work import ended, parked, until, working
from opentelemetry import context, metrics, propagate, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import venturi

Connect: t.TypeAlias = cabc.Callable[..., psycopg.Connection[t.Any]]


@pytest.fixture
def schema(emptied: str) -> str:
    """All tests here are content with one schema, emptied in between."""
    return emptied


@venturi.task("send.mail")
class Mail:
    key: str | None = None
    end: str = "return"

    def dedup_key(self) -> str | None:
        return self.key


@venturi.task("send.letter")
class Letter:
    """Of a kind that no worker handles."""


class Sdk:
    """What the providers of the SDK have collected."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._reader = InMemoryMetricReader()
        self._exporter = InMemorySpanExporter()
        self.meters = MeterProvider([self._reader], shutdown_on_exit=False)
        self.tracers = TracerProvider(shutdown_on_exit=False)
        self.tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        # The API lets a program set its providers once; a test needs them for a while.
        monkeypatch.setattr(metrics, "get_meter", self.meters.get_meter)
        monkeypatch.setattr(trace, "get_tracer", self.tracers.get_tracer)

    def points(self, name: str) -> list[t.Any]:
        """The data points of an instrument."""
        data = self._reader.get_metrics_data()
        scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics] if data else []
        found = [metric for scope in scopes for metric in scope.metrics if metric.name == name]
        return [point for metric in found for point in metric.data.data_points]

    def total(self, name: str, **attributes: str) -> int:
        """The sum of a counter, or the number of a histogram's values, over the points with these attributes."""
        wanted = {name.replace("__", "."): value for name, value in attributes.items()}
        points = [p for p in self.points(name) if all(p.attributes.get(key) == wanted[key] for key in wanted)]
        return sum(p.value if hasattr(p, "value") else p.count for p in points)

    def spans(self, name: str) -> list[ReadableSpan]:
        """The spans of that name that have ended."""
        return [span for span in self._exporter.get_finished_spans() if span.name == name]


@pytest.fixture
def sdk(monkeypatch: pytest.MonkeyPatch) -> cabc.Iterator[Sdk]:
    sdk = Sdk(monkeypatch)
    yield sdk
    sdk.tracers.shutdown()
    sdk.meters.shutdown()


@pytest.fixture
def queue(sdk: Sdk, schema: str, dsn: str) -> cabc.Iterator[venturi.Queue]:
    """A queue whose handler ends as its task says."""
    queue = venturi.Queue(schema, dsn=dsn)

    @queue.handler
    def handle(task: Mail) -> None:
        if task.end == "fail":
            raise RuntimeError("secret text")

    yield queue
    queue.close()


@pytest.mark.conformance(219)
def test_the_messaging_metrics_name_queue_and_kind(queue: venturi.Queue, sdk: Sdk) -> None:
    """Sent, consumed, and how long the database and the handler took."""
    with working(queue):
        for job in [queue.enqueue(Mail()).id for _ in range(3)]:
            ended(queue, job)
    for name, unit in (
        ("messaging.client.sent.messages", 3),
        ("messaging.client.consumed.messages", 3),
        ("messaging.process.duration", 3),
        ("messaging.client.operation.duration", 3),
    ):
        assert sdk.total(name, venturi__kind="send.mail") == unit, name
        assert {p.attributes["messaging.destination.name"] for p in sdk.points(name)} == {queue.schema}, name
        assert {p.attributes["messaging.system"] for p in sdk.points(name)} == {"venturi"}, name
    assert sdk.total("messaging.client.operation.duration", messaging__operation__type="receive") > 0


@pytest.mark.conformance(220)
def test_merges_and_settled_outcomes_are_counted(queue: venturi.Queue, sdk: Sdk) -> None:
    """Each outcome apart, after its commit; a merged enqueue is no sent message (case 172)."""
    job = queue.enqueue(Mail(key="k")).id
    queue.enqueue(Mail(key="k"))
    assert sdk.total("venturi.merged", venturi__action="replaced") == 1
    assert sdk.total("messaging.client.sent.messages") == 1
    failing = queue.enqueue(Mail(end="fail")).id
    with working(queue):
        ended(queue, job)
        until(queue, failing, "retried")
    assert sdk.total("venturi.settled", venturi__outcome="completed") == 1
    assert sdk.total("venturi.settled", venturi__outcome="retried") == 1
    assert sdk.total("venturi.lost_claims") == sdk.total("venturi.settle_errors") == 0


@pytest.mark.conformance(220)
def test_a_recovery_and_the_refused_settle_after_it_are_counted(
    sdk: Sdk, schema: str, dsn: str, connect: Connect
) -> None:
    """The late result counts as a lost claim and as nothing else (case 172)."""
    queue = venturi.Queue(schema, dsn=dsn)
    began, go = threading.Event(), threading.Event()

    @queue.handler
    def handle(task: Mail) -> None:
        began.set()
        go.wait(10)

    with working(queue, lease=60), connect(autocommit=True) as connection:
        job = queue.enqueue(Mail()).id
        assert began.wait(5)
        # Once it has said that it lives, the first worker renews nothing for a third of a lease.
        eventually(lambda: queue.stats().workers == 1)
        connection.execute(on(schema, """UPDATE {schema}.live SET lease_until = now() - interval '1 s'"""))
        with working(queue, lease=60):
            until(queue, job, "recovered")
        assert sdk.total("venturi.recovered", venturi__kind="send.mail") == 1
        go.set()
        eventually(lambda: sdk.total("venturi.lost_claims", venturi__kind="send.mail") == 1)
    assert sdk.total("venturi.settled") == 0
    queue.close()


@pytest.mark.conformance(220)
def test_releases_settle_errors_and_reconnects_are_counted(sdk: Sdk, schema: str, dsn: str, connect: Connect) -> None:
    """A straggler at the deadline, a settle whose session was killed, a listener that had to come back (case 172)."""
    queue = venturi.Queue(schema, dsn=dsn)
    began, go = threading.Semaphore(0), threading.Event()

    @queue.handler
    def handle(task: Mail) -> None:
        began.release()
        go.wait(10)

    with queue.work(block=False, poll=60, concurrency=1, shutdown_timeout=0) as worker:
        with connect(autocommit=True) as connection:
            job = queue.enqueue(Mail()).id
            assert began.acquire(timeout=5)
            connection.execute(
                """SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
                    WHERE application_name IN ('venturi coordinator', 'venturi listener')"""
            )
            go.set()
            ended(queue, job)
            parked(connection)
        assert sdk.total("venturi.settle_errors") == 1
        assert sdk.total("venturi.listener.reconnects") == 1
        assert sdk.total("venturi.settled") == 1
        go.clear()
        queue.enqueue(Mail())
        assert began.acquire(timeout=5)
        worker.stop()
        worker.join(5)
        assert sdk.total("venturi.released", venturi__kind="send.mail") == 1
        go.set()
        eventually(lambda: sdk.total("venturi.lost_claims") == 1)
    queue.close()


@pytest.mark.conformance(221)
def test_claim_latency_runs_from_the_time_at_which_the_job_was_due(
    queue: venturi.Queue, sdk: Sdk, connect: Connect
) -> None:
    """A job that was delayed by an hour shows milliseconds, whatever the delay was."""
    job = queue.enqueue(Mail(), delay=dt.timedelta(hours=1)).id
    with connect(autocommit=True) as connection:
        connection.execute(
            on(
                queue.schema,
                """UPDATE {schema}.jobs SET created_at = now() - interval '1 h';
                UPDATE {schema}.live SET visible_at = now() + interval '300 ms'""",
            )
        )
    with working(queue, poll=60):
        ended(queue, job)
    (point,) = sdk.points("venturi.claim.latency")
    assert point.count == 1
    assert 0 <= point.sum < 0.25


@pytest.mark.conformance(223)
def test_a_run_is_linked_to_its_enqueue_and_is_not_its_child(queue: venturi.Queue, sdk: Sdk, connect: Connect) -> None:
    """The producer's span is stored with the job; the consumer's names job, kind and run number (case 170)."""
    with sdk.tracers.get_tracer("app").start_as_current_span("request") as request:
        job = queue.enqueue(Mail()).id
    (sent,) = sdk.spans("send send.mail")
    assert sent.kind is trace.SpanKind.PRODUCER
    assert sent.parent is not None
    assert sent.parent.span_id == request.get_span_context().span_id
    with connect() as connection:
        ((stored,),) = connection.execute(on(queue.schema, "SELECT trace FROM {schema}.jobs")).fetchall()
    assert format(_context(sent).span_id, "016x") in stored["traceparent"]
    with working(queue):
        ended(queue, job)
        (run,) = eventually(lambda: sdk.spans("process send.mail"))
    assert run.kind is trace.SpanKind.CONSUMER
    assert run.parent is None
    assert [link.context.span_id for link in run.links] == [_context(sent).span_id]
    assert _context(run).trace_id != _context(sent).trace_id
    attributes = run.attributes or {}
    assert (attributes["messaging.message.id"], attributes["venturi.kind"], attributes["venturi.run"]) == (
        str(job), "send.mail", 1
    )  # fmt: skip


@pytest.mark.conformance(223, 224)
def test_the_span_of_a_failed_run_says_so_and_holds_no_text_of_the_error(queue: venturi.Queue, sdk: Sdk) -> None:
    """The error may quote the payload (cases 019, 168)."""
    with working(queue):
        until(queue, queue.enqueue(Mail(end="fail")).id, "retried")
        (run,) = eventually(lambda: sdk.spans("process send.mail"))
    assert run.status.status_code is trace.StatusCode.ERROR
    assert (run.attributes or {})["venturi.outcome"] == "retried"
    assert "secret" not in run.to_json()


def _context(span: ReadableSpan) -> trace.SpanContext:
    return t.cast(trace.SpanContext, span.get_span_context())


@venturi.task("trace")
class Traced:
    number: int


def test_no_run_inherits_a_context(queue: venturi.Queue, sdk: Sdk, caplog: pytest.LogCaptureFixture) -> None:
    """Neither that of the worker's start nor what a run on the same slot, or a thread of it, left open (case 170)."""
    tracer = sdk.tracers.get_tracer("app")
    found = list[trace.Span]()

    @queue.handler
    def handle(task: Traced) -> None:
        found.append(trace.get_current_span())
        context.attach(context.set_value("left", task.number))
        context.attach(trace.set_span_in_context(tracer.start_span(f"left open {task.number}")))
        thread = threading.Thread(target=lambda: tracer.start_span("alone").end())
        thread.start()
        thread.join()
        if task.number % 2:
            raise RuntimeError("no")

    with tracer.start_as_current_span("start"), working(queue, concurrency=1):
        before = context.get_current()
        jobs = [receipt.id for receipt in queue.enqueue_many([Traced(n) for n in range(3)])]
        ended(queue, jobs[0])
        until(queue, jobs[1], "retried")
        ended(queue, jobs[2])
        eventually(lambda: len(sdk.spans("process trace")) == 3)
        assert context.get_current() == before
    runs = sdk.spans("process trace")
    assert [run.parent for run in runs] == [None] * 3
    assert [span.get_span_context() for span in found] == [run.get_span_context() for run in runs]
    assert len({_context(run).trace_id for run in runs}) == 3
    assert [span.parent for span in sdk.spans("alone")] == [None] * 3
    assert caplog.records == []


class Broken:
    """A tracer, meter and span that raise whatever is asked of them."""

    def __getattr__(self, name: str) -> t.NoReturn:
        raise RuntimeError("broken telemetry")


class HalfBroken(Broken):
    """A tracer that starts spans, which are broken, and a meter whose instruments are."""

    def start_span(self, *arguments: object, **options: object) -> Broken:
        return Broken()

    create_counter = create_histogram = start_span


@pytest.mark.conformance(219, 223)
@pytest.mark.parametrize("broken", [Broken(), HalfBroken()], ids=["tracer", "span"])
def test_telemetry_that_raises_changes_nothing(
    schema: str, dsn: str, monkeypatch: pytest.MonkeyPatch, broken: Broken
) -> None:
    """Jobs are enqueued, merged, run and retried as ever (case 019)."""

    def get(*arguments: object) -> Broken:
        return broken

    monkeypatch.setattr(trace, "get_tracer", get)
    monkeypatch.setattr(metrics, "get_meter", get)
    queue = venturi.Queue(schema, dsn=dsn)

    @queue.handler
    def handle(task: Mail) -> None:
        if task.end == "fail":
            raise RuntimeError("no")

    merged = queue.enqueue(Mail(key="k")).id
    assert queue.enqueue(Mail(key="k")) == venturi.Receipt(merged, "replaced")
    failing = queue.enqueue_many([Mail(end="fail")])[0].id
    with working(queue):
        until(queue, merged, "merged", "completed")
        until(queue, failing, "retried")
        with pytest.raises(TypeError):
            queue.enqueue(object())
    queue.close()


@pytest.mark.conformance(223)
@pytest.mark.parametrize(
    "stored", ["null", "{}", '{"traceparent": "nonsense"}', '[1, "x"]', '"text"', '{"traceparent": 7}']
)
def test_a_stored_trace_context_that_makes_no_sense_is_ignored(
    queue: venturi.Queue, sdk: Sdk, connect: Connect, stored: str
) -> None:
    """The run has a span without a link."""
    job = queue.enqueue(Mail()).id
    with connect(autocommit=True) as connection:
        connection.execute(on(queue.schema, "UPDATE {schema}.jobs SET trace = %s::jsonb"), [stored])
    with working(queue):
        until(queue, job, "completed")
        (run,) = eventually(lambda: sdk.spans("process send.mail"))
    assert not run.links


@pytest.mark.conformance(223)
@pytest.mark.parametrize("value", ["a\x00b", "\ud800", b"bytes", object(), "x" * 20_000_000])
def test_headers_of_any_kind_fail_no_enqueue(
    queue: venturi.Queue, sdk: Sdk, connect: Connect, monkeypatch: pytest.MonkeyPatch, value: t.Any
) -> None:
    """What a propagator of the program's writes is stored as text of bounded length (case 172)."""

    def inject(carrier: dict[str, t.Any], *_: object) -> None:
        carrier["x-trace"] = value

    monkeypatch.setattr(propagate, "inject", inject)
    with connect() as caller:
        queue.enqueue(Letter(), conn=caller)
        queue.enqueue_many([Letter()], conn=caller)
        query = on(queue.schema, "SELECT DISTINCT length(trace::text) BETWEEN 1 AND 10000 FROM {schema}.jobs")
        assert caller.execute(query).fetchall() == [(True,)]


WITHOUT_SDK = """
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("opentelemetry.sdk") or name.startswith("opentelemetry.exporter"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Gone())
ran = threading.Event()

@venturi.task("mail")
class Mail:
    pass

@queue.handler
def handle(task: Mail) -> None:
    ran.set()

with queue.work(block=False):
    job = queue.enqueue(Mail()).id
    assert ran.wait(10)
say("status", queue.job(job).status, any(name.startswith("opentelemetry.sdk") for name in sys.modules))
queue.close()
"""


@pytest.mark.conformance(222)
def test_without_an_sdk_everything_works_and_nothing_is_exported(
    program: Programs, schema: str, connect: Connect
) -> None:
    """The API package alone is needed; no trace context is stored."""
    script = program(WITHOUT_SDK)
    assert script.hears("status") == "completed False"
    assert script.ends() == 0
    with connect() as connection:
        assert connection.execute(on(schema, "SELECT trace FROM {schema}.jobs")).fetchall() == [(None,)]


def test_depth_and_age_are_gauges_of_one_snapshot(queue: venturi.Queue, sdk: Sdk) -> None:
    """They show the queue, foreign kinds too, while a worker runs in this process, and nothing afterwards."""
    queue.enqueue(Letter(), delay=dt.timedelta(hours=1))
    queue.enqueue(Letter())
    with working(queue):
        eventually(
            lambda: sdk.total("venturi.queue.depth", venturi__kind="send.letter", venturi__state="scheduled") == 1
        )
        assert sdk.total("venturi.queue.depth", venturi__kind="send.letter", venturi__state="ready") == 1
        (age,) = sdk.points("venturi.queue.oldest_ready_age")
        assert 0 <= age.value < 5
    eventually(lambda: not sdk.points("venturi.queue.depth"))


def test_a_snapshot_that_cannot_be_had_leaves_the_gauges_out(queue: venturi.Queue, sdk: Sdk) -> None:
    """A collection neither raises nor reports."""

    def unreachable() -> venturi.Stats:
        raise psycopg.OperationalError("away")

    queue.telemetry.observe(unreachable)
    assert sdk.points("venturi.queue.depth") == []
    queue.telemetry.unobserve(unreachable)
