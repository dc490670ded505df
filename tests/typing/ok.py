"""Right uses: both checkers accept every line."""

import datetime as dt
import threading
import typing as t
import uuid

import attrs
import psycopg

import venturi
import venturi.testing

SECOND = dt.timedelta(seconds=1)
DictConnection: t.TypeAlias = psycopg.Connection[dict[str, t.Any]]


class App:
    def mail(self, to: int) -> None: ...


queue = venturi.Queue[App]("billing", dsn="dbname=app", pool_size=4, listen_dsn=None, notify=True, pooler=False)
plain = venturi.Queue("reports")


# --- Tasks


@venturi.task("mail.welcome", priority=venturi.Priority.HIGH)
class Welcome:
    user_id: int
    locale: str = "en"

    def dedup_key(self) -> str:
        return str(self.user_id)

    def merge(self, existing: "venturi.Pending[Welcome]") -> "venturi.Merge[Welcome]":
        return venturi.Keep() if existing.task.locale == self.locale else venturi.Replace(delay=SECOND)


@attrs.define
class Cursor:
    page: int = 0


@venturi.task(
    "feed.import", carry=Cursor, backoff=venturi.Backoff(base=2, cap=SECOND * 60), timeout=SECOND, aliases=["feed"]
)
class ImportFeed:
    url: str
    tags: list[str] = attrs.field(factory=list[str])

    def merge(self, existing: "venturi.Pending[ImportFeed, Cursor]") -> "venturi.Merge[ImportFeed]":
        if existing.run_count == 0 and existing.priority is not venturi.Priority.HIGH:
            return venturi.Independent()
        both = ImportFeed(self.url, existing.task.tags + self.tags)
        return venturi.Combine(both, carry=Cursor(existing.carry.page), priority=venturi.Priority.LOW, delay=SECOND)


@venturi.task("report.send")
@attrs.frozen
class SendReport:
    names: list[str]

    def merge(self, existing: "venturi.Pending[SendReport]") -> "venturi.Merge[SendReport]":
        return venturi.Combine(attrs.evolve(self, names=existing.task.names + self.names))


# --- Handlers


@queue.handler(cap=4)
def welcome(task: Welcome, ctx: venturi.Context[None, App]) -> None:
    ctx.state.mail(task.user_id)
    ctx.attach(sent=True, to=[task.user_id])
    ctx.logger.info("sent after %s", ctx.time_remaining)


@queue.handler
def feed(task: ImportFeed, ctx: venturi.Context[Cursor, App]) -> venturi.Outcome:
    if not task.url:
        raise venturi.PermanentError("no url")
    if ctx.failure_count > 3 and ctx.history[-1].note:
        raise venturi.RetryLater(dt.timedelta(minutes=5), "the site is slow")
    ctx.cancelled.check()
    ctx.carry.page += 1
    if ctx.cancelled.wait(0.1) and ctx.cancelled.reason == "shutdown":
        return venturi.Pause(note="shutdown")
    return venturi.Pause(SECOND) if ctx.carry.page < 3 else venturi.Completed("3 pages")


@venturi.handler
def bare(task: Welcome) -> None: ...


@venturi.handler(cap=2, dead_on=(ValueError, KeyError))
def with_context(task: ImportFeed, ctx: venturi.Context[Cursor]) -> venturi.Outcome:
    return None


@plain.handler(task=Welcome)
def named(task: Welcome) -> None: ...


def by_hand(handler: venturi.Handler[Welcome]) -> venturi.Outcome:
    return handler(Welcome(7))


def deep() -> uuid.UUID:
    return venturi.current_context().id


# --- Producers and operators


def view(conn: psycopg.Connection, rows: DictConnection) -> list[uuid.UUID]:
    receipt = queue.enqueue(Welcome(7), conn=conn, delay=dt.timedelta(hours=1), priority=venturi.Priority.LOW)
    venturi.enqueue(Welcome(7, locale="fr"), conn=rows, at=dt.datetime.now(dt.UTC), notify=False)
    many = venturi.enqueue_many([Welcome(1), ImportFeed("x")], conn=rows, delay=SECOND)
    many += queue.enqueue_many((Welcome(n) for n in range(3)), priority=venturi.Priority.HIGH)
    return [each.id for each in (receipt, *many) if each.action in ("inserted", "replaced")]


def operate(id: uuid.UUID, conn: psycopg.Connection) -> int:
    job = queue.job(id, conn=conn)
    page = queue.jobs(kind="mail.welcome", status="dead", before=id, finished_since=dt.datetime.now(dt.UTC), limit=10)
    notes = [entry.note for entry in venturi.journal(id) if entry.outcome == "retried"]
    ready = sum(counts.ready for counts in venturi.stats(conn=conn).kinds.values())
    done = venturi.cancel(id) or venturi.requeue(id, delay=SECOND, conn=conn)
    deleted = queue.cleanup(finished_before=dt.datetime.now(dt.UTC), status="completed")
    names: list[str] = queue.migrate()
    kept = 0 if job is None else job.failure_count
    return len(page) + len(notes) + ready + done + deleted + len(names) + kept + queue.requeue_many(kind="x", limit=5)


# --- Workers


def boot(stop: threading.Event) -> list[uuid.UUID]:
    with queue.work(state=App(), concurrency=8, block=False, poll=0.5, lease=SECOND * 30, stop=stop) as worker:
        worker.stop(3)
        report = worker.join(SECOND.total_seconds())
    if report is None:
        report = queue.work(state=App(), shutdown_timeout=10, jitter=0.3, backstop=None, priority_ratio=None)
    report = venturi.work(concurrency=2, signals=False, backoff=venturi.Backoff(0.5))
    return [released.id for released in report.released]


def either(waits: bool) -> list[venturi.Report | venturi.Worker]:
    return [plain.work(block=waits), venturi.work(block=waits), queue.work(state=App(), block=waits)]


def ready(any_queue: venturi.Queue[t.Any]) -> int:
    return sum(counts.ready for counts in any_queue.stats().kinds.values())


total = ready(queue) + ready(plain) + ready(venturi.default)


# --- Tests


def test_feed(conn: psycopg.Connection) -> None:
    called = venturi.testing.call(feed, ImportFeed("x"), carry=Cursor(page=2), state=App(), failure_count=1)
    assert called.carry.page == 3
    assert called.outcome == venturi.Completed("3 pages")
    assert [each.user_id for each in venturi.testing.queued(conn, Welcome, queue=queue)] == [7]
    assert venturi.testing.assert_enqueued(conn, Welcome, queue=queue, user_id=7).locale == "en"
    assert venturi.testing.drain(conn, queue=queue, now=SECOND, state=App(), limit=10)


def test_sign_up(conn: psycopg.Connection, rows: DictConnection) -> None:
    first = venturi.testing.call(feed, ImportFeed("x"), history=[], cancelled="operator", id=uuid.uuid4())
    assert first.outcome is None
    with venturi.testing.using(rows, queue=queue):
        plain.enqueue(Welcome(7))
    for run in venturi.testing.drain(rows, queue=queue, now=dt.datetime.now(dt.UTC), backstop=None):
        assert run.outcome == "completed", run.note
        if run.error is not None:
            raise run.error
    mixed: list[t.Any] = venturi.testing.queued(conn)
    assert mixed == [Welcome(7)]
