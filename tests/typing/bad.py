"""Wrong uses: both checkers refuse each marked line, and no other."""

import attrs
import psycopg
from ok import App, Cursor, ImportFeed, Welcome, feed, plain, queue, welcome

import venturi
import venturi.testing

# --- Tasks

Welcome("x")  # bad
Welcome(7, lcale="x")  # bad
Welcome()  # bad
Welcome(1).user_id = 2  # bad


@venturi.task()  # bad
class Nameless: ...


@venturi.task("a", priority="high")  # bad
class Urgent: ...


@venturi.task("b", backoff=2)  # bad
class Slow: ...


@venturi.task("c", timeout="1s")  # bad
class Timed: ...


@venturi.task("d")
class Merging:
    names: list[str] = attrs.field(factory=list[str])

    def merge(self, existing: "venturi.Pending[Merging]") -> "venturi.Merge[Merging]":
        if existing.task.nmes:  # bad
            return venturi.Combine(Welcome(1))  # bad
        if self.names:
            return venturi.Completed()  # bad
        return venturi.Replace(delay=5)  # bad


# --- Handlers


@queue.handler  # bad
def returns_text(task: Welcome) -> str:
    return ""


@queue.handler  # bad
async def waits(task: Welcome) -> None: ...


@queue.handler(cap="two")  # bad
def capped(task: Welcome) -> None: ...


@queue.handler(dead_on=ValueError)  # bad
def gives_up(task: Welcome) -> None: ...


@queue.handler(retries=3)  # bad
def tries(task: Welcome) -> None: ...


@queue.handler(cap=1)  # bad
def other_state(task: ImportFeed, ctx: venturi.Context[Cursor, int]) -> None: ...


@queue.handler  # bad
def too_many(task: ImportFeed, ctx: venturi.Context[Cursor, App], more: int) -> None: ...


@queue.handler
def inside(task: ImportFeed, ctx: venturi.Context[Cursor, App]) -> venturi.Outcome:
    task.url = "x"  # bad
    ctx.carry.pge = 1  # bad
    ctx.state.male(1)  # bad
    ctx.attach("sent")  # bad
    if ctx.cancelled.reason == "shutdown":
        raise venturi.RetryLater(60)  # bad
    return venturi.Pause(5)  # bad


welcome(ImportFeed("x"))  # bad

# --- Producers and operators

queue.enqueue(Welcome(1), conn="dsn")  # bad
queue.enqueue(Welcome(1), delay=5)  # bad
queue.enqueue(Welcome(1), at="tomorrow")  # bad
queue.enqueue(Welcome(1), priority=1)  # bad
queue.enqueue(Welcome(1), key="x")  # bad
venturi.enqueue_many(Welcome(1))  # bad
venturi.enqueue_many([Welcome(1)], delay=5)  # bad
print(queue.enqueue(Welcome(1)).job)  # bad
queue.job("0190")  # bad
queue.jobs(status="done")  # bad
queue.jobs(limit="10")  # bad
queue.cleanup()  # bad
queue.cleanup(finished_before=30)  # bad
queue.requeue(queue.enqueue(Welcome(1)))  # bad
print(venturi.stats().kinds["mail.welcome"].redy)  # bad

# --- Workers

venturi.Queue(schema=1)  # bad
venturi.Queue("a", poolsize=2)  # bad
queue.work()  # bad
queue.work(state=3)  # bad
queue.work(state=App(), concurrency="4")  # bad
queue.work(state=App(), stop=True)  # bad
plain.work(threads=4)  # bad
plain.work(backoff=2)  # bad
print(plain.work(block=False).released)  # bad
plain.work().join()  # bad
feed(ImportFeed("x"), priority=venturi.Priority.LOW)  # bad

# --- Tests

venturi.testing.call(welcome, ImportFeed("x"))  # bad
print(venturi.testing.call(feed, ImportFeed("x"), carry=Cursor()).carry.pge)  # bad
venturi.testing.call(feed, ImportFeed("x"), cancelled="tired")  # bad
venturi.testing.drain("dsn")  # bad
venturi.testing.call(feed, Welcome(7), carry=Cursor())  # bad
print(venturi.testing.call(feed, ImportFeed("x")).outcme)  # bad


def test_looks(conn: psycopg.Connection) -> None:
    venturi.testing.drain(conn, now=60)  # bad
    print(venturi.testing.queued(conn, Welcome)[0].user)  # bad
    print(venturi.testing.assert_enqueued(conn, Welcome).user)  # bad
    with venturi.testing.using("dsn"):  # bad
        print(venturi.testing.drain(conn)[0].result)  # bad
