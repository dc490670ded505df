"""Hours of mixed work while everything is killed at random: ``python -m tests.soak --minutes 60`` from the checkout.

Several worker and producer processes share one queue. Now and then one of them is killed or asked to stop, or a session
of theirs is ended by the server. One worker is spared: it must live to the end, and its memory must not grow. An old
snapshot is held open for the first half, and the rate must have recovered in the last third. In the end every job that
was enqueued must be completed, or dead where that was to be expected, and the journal must have each of its runs.
"""

from __future__ import annotations

import argparse
import collections.abc as cabc
import contextlib
import datetime as dt
import logging
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
import typing as t
import uuid

import attrs
import psycopg
from psycopg import sql

import venturi
from venturi import embedded

# The helpers lie beside this file, where only pytest looks by itself.
sys.path.insert(0, str(pathlib.Path(__file__).parent))

from faults.accounting import accounted

SCHEMA = "soak"
WORKERS, PRODUCERS, SLOTS = 3, 2, 4
REPORT = 10.0
"""Seconds between two lines of the report."""

ENOUGH = 3000
"""Unfinished jobs at which producers wait."""

GROWTH = 30.0
"""MB by which the spared worker may have grown since the end of the first third."""

RECOVERED = 0.5
"""Least share of the first third's rate that the last third must have."""

QUICK = venturi.Backoff(0.05, 1.0)


@venturi.task("plain", backoff=QUICK)
class Plain:
    seconds: float


@venturi.task("flaky", backoff=QUICK)
class Flaky:
    failures: int


@venturi.task("bad", backoff=QUICK)
class Bad:
    """Ends dead, whatever happens."""


@venturi.task("capped", backoff=QUICK, priority=venturi.Priority.LOW)
class Capped:
    seconds: float


@venturi.task("keyed", backoff=QUICK, priority=venturi.Priority.HIGH)
class Keyed:
    key: int

    def dedup_key(self) -> int:
        return self.key


@attrs.define
class Pages:
    read: int = 0


@venturi.task("paged", backoff=QUICK, carry=Pages)
class Paged:
    pages: int


# --- The processes


def work(dsn: str) -> None:
    """A worker process."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(process)d %(levelname)s %(name)s %(message)s")
    queue: venturi.Queue = venturi.Queue(SCHEMA, dsn=dsn)

    @queue.handler
    def plain(task: Plain) -> None:
        time.sleep(task.seconds)

    @queue.handler
    def flaky(task: Flaky, ctx: venturi.Context) -> None:
        if ctx.failure_count < task.failures:
            raise RuntimeError("as told")

    @queue.handler
    def bad(task: Bad) -> None:
        raise venturi.PermanentError("as told")

    @queue.handler(cap=1)
    def capped(task: Capped) -> None:
        time.sleep(task.seconds)

    @queue.handler
    def keyed(task: Keyed) -> None:
        time.sleep(0.005)

    @queue.handler
    def paged(task: Paged, ctx: venturi.Context[Pages]) -> venturi.Outcome:
        ctx.carry.read += 1
        return None if ctx.carry.read >= task.pages else venturi.Pause(dt.timedelta(milliseconds=50))

    queue.work(concurrency=SLOTS, lease=3, poll=2, shutdown_timeout=5, backstop=None)


def produce(dsn: str, ledger: str, seed: int) -> None:
    """A producer process: it writes the id of every enqueue that was answered to the ledger, and goes on."""
    queue: venturi.Queue = venturi.Queue(SCHEMA, dsn=dsn)
    dice = random.Random(seed)
    with open(ledger, "a", buffering=1) as book:
        for number in range(sys.maxsize):
            with contextlib.suppress(psycopg.Error):
                receipts = _enqueue(queue, dice)
                book.writelines(f"{receipt.id}\n" for receipt in receipts)
                while number % 20 == 0 and sum(k.ready for k in queue.stats().kinds.values()) > ENOUGH:
                    time.sleep(0.2)
            time.sleep(dice.uniform(0, 0.02))


def _enqueue(queue: venturi.Queue, dice: random.Random) -> list[venturi.Receipt]:
    tasks = [_task(dice) for _ in range(dice.choice((1, 1, 1, 5, 50)))]
    delay = dt.timedelta(seconds=dice.choice((0, 0, 0, 0.5, 5)))
    priority = dice.choice((None, None, *venturi.Priority))
    if len(tasks) == 1:
        return [queue.enqueue(tasks[0], delay=delay, priority=priority)]
    return queue.enqueue_many(tasks, delay=delay, priority=priority)


def _task(dice: random.Random) -> object:
    makers: list[cabc.Callable[[], object]] = [
        lambda: Plain(dice.choice((0.0, 0.0, 0.001, 0.01))),
        lambda: Plain(0.0),
        lambda: Flaky(dice.randrange(4)),
        Bad,
        lambda: Capped(0.002),
        lambda: Keyed(dice.randrange(200)),
        lambda: Paged(dice.randrange(1, 5)),
        lambda: Plain(5.0 if dice.random() < 0.01 else 0.0),  # longer than the lease
    ]
    return dice.choice(makers)()


# --- The conductor


class Process:
    """One of the processes, started again whenever it was made to end.

    Attributes:
        deaths: How often it was.
    """

    def __init__(self, folder: pathlib.Path, *arguments: str) -> None:
        self._arguments = arguments
        self._words = folder / f"{arguments[0]}-{uuid.uuid4().hex[:6]}.log"
        self.deaths = 0
        self.start()

    def start(self) -> None:
        self._sent: set[signal.Signals] = set()
        with self._words.open("a") as words:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.soak", "--as", *self._arguments],
                stderr=words,
                cwd=pathlib.Path(__file__).parents[1],
            )

    def keep_alive(self) -> None:
        """Start it again if it has ended."""
        if self._process.poll() is not None:
            self._check_end()
            self.deaths += 1
            self.start()

    def send(self, number: signal.Signals) -> bool:
        """Send it a signal; False when it has ended before."""
        if alive := self._process.poll() is None:
            self._sent.add(number)
            self._process.send_signal(number)
        return alive

    def end(self, number: signal.Signals) -> None:
        """End it for good."""
        self.send(number)
        self._process.wait(30)
        self._check_end()

    def _check_end(self) -> None:
        expected = {-number for number in self._sent} | {0 for number in self._sent if number == signal.SIGTERM}
        if self._process.returncode not in expected:
            sent = ", ".join(sorted(number.name for number in self._sent)) or "nothing"
            raise SystemExit(
                f"a {self._arguments[0]} that was sent {sent} ended with {self._process.returncode}:\n{self.words}"
            )
        # What is meant to fail here is logged without one.
        if "Traceback" in self._words.read_text():
            raise SystemExit(f"a {self._arguments[0]} has met an error that nobody expected:\n{self.words}")

    @property
    def memory(self) -> float:
        """Its resident memory in MB; 0: it has ended."""
        with contextlib.suppress(OSError, StopIteration):
            lines = pathlib.Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
            return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024
        return 0.0

    @property
    def words(self) -> str:
        """The end of what it has logged."""
        return self._words.read_text()[-4000:]


class Sample(t.NamedTuple):
    """How it stood at one moment.

    Attributes:
        at: On the monotonic clock.
        ended: Jobs that had ended.
        memory: That of the spared worker, in MB.
    """

    at: float
    ended: int
    memory: float


class Soak:
    """The whole of it.

    Args:
        dsn: Where to; the schema ``soak`` there is made anew.
        seed: Of all random choices of this process.
    """

    def __init__(self, dsn: str, seed: int, folder: pathlib.Path) -> None:
        self._dsn = dsn
        self._dice = random.Random(seed)
        self._queue: venturi.Queue = venturi.Queue(SCHEMA, dsn=dsn)
        self._database = psycopg.connect(dsn, autocommit=True)
        self._ask("DROP SCHEMA IF EXISTS {q} CASCADE")
        self._queue.migrate()
        self._ledgers = [folder / f"ledger-{n}" for n in range(PRODUCERS)]
        self._workers = [Process(folder, "worker", dsn) for _ in range(WORKERS)]
        self._producers = [Process(folder, "producer", dsn, str(book), str(seed + n))
                           for n, book in enumerate(self._ledgers)]  # fmt: skip
        self._began = time.monotonic()
        self._samples = [Sample(self._began, 0, 0.0)]
        self._harm = dict.fromkeys(("worker killed", "worker stopped", "producer killed", "session ended"), 0)

    def run(self, minutes: float) -> None:
        """Do harm until the time is over, then let everything come to its end, and count."""
        with psycopg.connect(self._dsn) as old:
            old.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            old.execute("SELECT 1")
            self._harass(self._began + minutes * 30)
        print("the old snapshot is gone", flush=True)
        self._harass(self._began + minutes * 60)
        self._check_samples()
        for producer in self._producers:
            producer.end(signal.SIGKILL)
        self._drain()
        for worker in self._workers:
            worker.end(signal.SIGTERM)
        self._count()

    def close(self) -> None:
        """Leave nothing running."""
        for process in (*self._workers, *self._producers):
            process.send(signal.SIGKILL)
        self._database.close()
        self._queue.close()

    def _harass(self, until: float) -> None:
        while time.monotonic() < until:
            time.sleep(self._dice.uniform(0.1, 4.0))
            self._do_harm()
            for process in (*self._workers, *self._producers):
                process.keep_alive()
            self._tell()

    def _do_harm(self) -> None:
        match what := self._dice.choice(list(self._harm)):
            case "worker killed":
                done = self._dice.choice(self._workers[1:]).send(signal.SIGKILL)
            case "worker stopped":
                done = self._dice.choice(self._workers[1:]).send(signal.SIGTERM)
            case "producer killed":
                done = self._dice.choice(self._producers).send(signal.SIGKILL)
            case _:
                done = self._ask("""SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                                     WHERE application_name LIKE 'venturi %%' ORDER BY random() LIMIT 1""") == [(True,)]
        self._harm[what] += done

    def _drain(self) -> None:
        deadline = time.monotonic() + 180
        while self._ask("SELECT 1 FROM {q}.live LIMIT 1"):
            if time.monotonic() > deadline:
                raise SystemExit(f"not drained: {self._queue.stats()}")
            for worker in self._workers:
                worker.keep_alive()
            time.sleep(0.5)
            self._tell()

    def _tell(self) -> None:
        now, before = time.monotonic(), self._samples[-1]
        if now - before.at < REPORT:
            return
        unfinished, dead_rows, ended = self._ask("""
            SELECT (SELECT count(*) FROM {q}.live),
                   (SELECT n_dead_tup FROM pg_stat_user_tables WHERE relid = %s::regclass),
                   (SELECT count(*) FROM {q}.journal WHERE outcome IN (0, 3))""", f"{SCHEMA}.live")[0]  # fmt: skip
        self._samples.append(Sample(now, ended, self._workers[0].memory))
        memory = " ".join(f"{process.memory:.0f}" for process in (*self._workers, *self._producers))
        print(
            f"{now - self._began:6.0f} s  {_rate(self._samples[-2:]):7.0f} ended/s  {unfinished:6} unfinished  "
            f"{dead_rows:7} dead rows  memory {memory} MB",
            flush=True,
        )

    def _check_samples(self) -> None:
        third = max(1, len(self._samples) // 3)
        first, last = self._samples[: third + 1], self._samples[-third - 1 :]
        grown = last[-1].memory - first[-1].memory
        share = _rate(last) / _rate(first)
        print(f"the spared worker has grown by {grown:.1f} MB; the last third had {share:.2f} of the first one's rate")
        if self._workers[0].deaths or not last[-1].memory:
            raise SystemExit(f"the worker that was spared has ended:\n{self._workers[0].words}")
        if grown > GROWTH:
            raise SystemExit(f"it may grow by {GROWTH:g} MB")
        if share < RECOVERED:
            raise SystemExit(f"the rate has not recovered: {RECOVERED:g} was to be expected")

    def _count(self) -> None:
        books = [[uuid.UUID(line) for line in book.read_text().split("\n")[:-1]] for book in self._ledgers]
        if not all(books):
            raise SystemExit("a producer has enqueued nothing")
        ids = {id for book in books for id in book}
        outcomes = accounted(self._dsn, SCHEMA, ids, statuses=("completed", "dead"), grace=20)
        unexpected = self._ask("SELECT id, kind, status FROM {q}.all_jobs WHERE (status = 'dead') <> (kind = 'bad')")
        if unexpected:
            raise SystemExit(f"ended otherwise than expected: {unexpected[:20]}")
        print(f"harm done: {self._harm}")
        print(f"{len(ids)} jobs by their receipts, all accounted for; entries: {dict(outcomes)}")

    def _ask(self, text: t.LiteralString, *parameters: object) -> list[tuple[t.Any, ...]]:
        cursor = self._database.execute(sql.SQL(text).format(q=sql.Identifier(SCHEMA)), parameters)
        return cursor.fetchall() if cursor.description else []


def _rate(samples: cabc.Sequence[Sample]) -> float:
    """Jobs that ended per second between the first and the last of them."""
    return (samples[-1].ended - samples[0].ended) / (samples[-1].at - samples[0].at)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long harm is done, at least 1; default: 10")
    parser.add_argument("--dsn", help="a server that may be used; default: a private one")
    parser.add_argument("--seed", type=int, default=None, help="of the random choices; default: another each time")
    parser.add_argument("--as", dest="role", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.minutes < 1:
        parser.error("--minutes: less than 1 is too short to compare rates")
    match given.role:
        case ["worker", dsn]:
            work(dsn)
        case ["producer", dsn, ledger, seed]:
            produce(dsn, ledger, int(seed))
        case _:
            conduct(given.minutes, given.dsn, random.randrange(10**6) if given.seed is None else given.seed)


def conduct(minutes: float, dsn: str | None, seed: int) -> None:
    """Run the soak on the server given or on a private one."""
    print(f"seed {seed}, {os.cpu_count()} cores", flush=True)
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        soak = Soak(dsn or stack.enter_context(embedded.server()).dsn, seed, folder)
        stack.callback(soak.close)
        soak.run(minutes)


if __name__ == "__main__":
    main()
