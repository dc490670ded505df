"""The orderly stop while the database hangs."""

from __future__ import annotations

import threading
import time

import pytest
from fixtures.proxy import Proxy
from fixtures.stubborn import Handlers, Work, stopped
from fixtures.waiting import eventually

import venturi


@pytest.fixture
def schema(emptied: str) -> str:
    """All tests here are content with one schema, emptied in between."""
    return emptied


@venturi.task("first")
class First:
    pass


@pytest.mark.conformance(187)
@pytest.mark.parametrize("end", ["return", "fail"])
def test_a_handler_that_ends_while_the_deadline_passes_is_settled_by_what_it_did(
    schema: str, dsn: str, proxy: Proxy, end: str
) -> None:
    """Its end came before the claims were given back, although the coordinator could not look at it in time."""
    queue = venturi.Queue(schema, dsn=proxy.dsn)
    handlers, first_ended = Handlers(queue), threading.Event()

    @queue.handler
    def first(task: First) -> None:
        first_ended.wait(10)

    worker = queue.work(block=False, concurrency=2, shutdown_timeout=0.4)
    observer = venturi.Queue(schema, dsn=dsn)
    observer.enqueue(First())
    slow = observer.enqueue(Work(end)).id
    handlers.await_begun(1)
    proxy.hold()
    first_ended.set()
    time.sleep(0.1)
    worker.stop()
    time.sleep(0.6)
    proxy.resume()
    report = stopped(worker)
    assert (report.settled, report.released, report.unsettled) == (2, (), ())
    assert [entry.outcome for entry in observer.journal(slow)] == ["completed" if end == "return" else "retried"]
    queue.close()
    observer.close()


@pytest.mark.conformance(188)
@pytest.mark.slow
def test_a_database_that_stops_answering_does_not_hold_up_the_stop(schema: str, dsn: str, proxy: Proxy) -> None:
    """work() returns within the shutdown timeout and five seconds, and says what it could not record."""
    queue = venturi.Queue(schema, dsn=proxy.dsn)
    handlers = Handlers(queue)
    worker = queue.work(block=False, poll=0.1, shutdown_timeout=0.2)
    observer = venturi.Queue(schema, dsn=dsn)
    running = observer.enqueue(Work()).id
    handlers.await_begun(1)
    eventually(lambda: observer.stats().workers == 1)
    proxy.hold()
    time.sleep(0.3)
    began = time.monotonic()
    worker.stop()
    report = stopped(worker, 6)
    assert time.monotonic() - began < 0.2 + 5
    assert report == venturi.Report(0, (), (running,))
    proxy.resume()
    proxy.cut()
    observer.close()
    queue.close()


@pytest.mark.conformance(188)
@pytest.mark.parametrize("phase", ["idle", "connecting", "ignoring"])
def test_a_hanging_database_does_not_hold_up_the_stop_in_any_phase(
    schema: str,
    dsn: str,
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    phase: str,
) -> None:
    """Not while the answer to a claim is awaited, nor a new connection, nor a handler that does not listen."""
    monkeypatch.setattr("venturi.worker.worker.GRACE", 1.0)
    queue = venturi.Queue(schema, dsn=proxy.dsn)
    handlers = Handlers(queue)
    worker = queue.work(block=False, poll=0.1, concurrency=2, shutdown_timeout=0.2)
    observer = venturi.Queue(schema, dsn=dsn)
    eventually(lambda: observer.stats().workers == 1)
    if phase == "ignoring":
        observer.enqueue(Work("ignore"))
        handlers.await_begun(1)
    proxy.hold()
    if phase == "connecting":
        proxy.cut()
    time.sleep(0.5)
    began = time.monotonic()
    worker.stop()
    report = stopped(worker)
    assert time.monotonic() - began < 0.2 + 1.0 + 0.5
    assert len(report.unsettled) == (phase == "ignoring")
    handlers.go.set()
    if phase == "ignoring":
        eventually(lambda: "the result of run 1 is not recorded, the worker had stopped" in caplog.text)
    proxy.resume()
    proxy.cut()
    observer.close()
    queue.close()
