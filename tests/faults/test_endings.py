"""Scripts that end, fork or are patched while a worker runs beside them."""

from __future__ import annotations

import collections.abc as cabc
import pathlib
import textwrap

import pytest
from faults.site import COMPLAINTS, Site

pytestmark = pytest.mark.faults

BEGIN = """
import faulthandler, multiprocessing, os, sys, threading, time, venturi
from faults.wsgi import Deed, enqueue, queue

"""

WAIT = """
enqueue(Deed(seconds=0.5))
waits = enqueue(Deed("wait", 60.0))
while queue.job(waits).status != "claimed":
    time.sleep(0.01)
"""

WORKERS = {
    "beside": "queue.work(block=False)\n",
    "daemon": "threading.Thread(target=queue.work, daemon=True).start()\n",
    "thread": "threading.Thread(target=queue.work).start()\n",
}

ENDS = {"return": ("", 0), "exit": ("sys.exit(3)", 3), "raise": ("raise ValueError('the end')", 1)}


@pytest.fixture
def site(dsn: str, schema: str, tmp_path: pathlib.Path) -> cabc.Iterator[Site]:
    """A script that enqueues; its processes are killed after the test."""
    site = Site(dsn, schema, tmp_path)
    yield site
    site.close()


def script(site: Site, source: str, begin: str = BEGIN) -> None:
    """Start a script."""
    (site.folder / "script.py").write_text(begin + textwrap.dedent(source))
    site.start("-X", "dev", "script.py")


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("worker", WORKERS)
def test_a_script_that_ends_beside_its_worker_leaves_no_claim(site: Site, worker: str, end: str) -> None:
    """However main ends and the worker was started: what runs is told and settled, and the exit status is main's.

    Case 137.
    """
    last, status = ENDS[end]
    script(site, WORKERS[worker] + WAIT + last)
    site.ends(status, complaints=COMPLAINTS[1:] if end == "raise" else COMPLAINTS)
    assert site.words.count("Traceback") == (end == "raise")
    outcomes = site.accounted()
    assert outcomes["released"] == 1
    assert outcomes["completed"] >= 1


@pytest.mark.parametrize("worker", WORKERS)
def test_a_script_that_ends_while_its_worker_starts_ends_quietly(site: Site, worker: str) -> None:
    """The worker may get as far as it wants: there is no traceback, no hang and no claim."""
    script(site, WORKERS[worker])
    site.ends()
    site.accounted()


def test_a_script_that_has_only_enqueued_ends_at_once(site: Site) -> None:
    """Nobody has to close a queue whose pool has been used."""
    script(site, "")
    site.ends(timeout=4)
    assert site.words == ""
    site.accounted("pending")


def test_pytest_ends_although_a_worker_was_left_running(site: Site) -> None:
    """A test that forgets its worker neither hangs the run nor strands a job (case 137)."""
    (site.folder / "test_left.py").write_text(
        f"{BEGIN}\ndef test_left():\n{textwrap.indent(WORKERS['beside'] + WAIT, '    ')}"
    )
    site.start("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_left.py")
    site.ends()
    assert "1 passed" in site.words
    assert site.accounted()["released"] == 1


FORKED = """
fork = multiprocessing.get_context("fork")
ready = fork.Barrier(2)

def child():
    for number in range(20):
        enqueue(Deed())
    with queue.work(block=False, concurrency=1):
        while queue.stats().workers < 3:
            time.sleep(0.01)
        ready.wait(20)  # neither leaves before the other has seen it
        enqueue(Deed())
    queue.close()

with queue.work(block=False) as worker:
    while queue.stats().workers < 1:
        time.sleep(0.01)
    children = [fork.Process(target=child) for _ in range(2)]
    for each in children:
        each.start()
    for number in range(20):
        enqueue(Deed())
    for each in children:
        each.join(20)
    assert [each.exitcode for each in children] == [0, 0], children
    enqueue(Deed())
    while queue.stats().workers != 1:
        time.sleep(0.01)
    while queue.stats().kinds:
        time.sleep(0.01)
queue.close()
"""


def test_children_of_a_process_that_works_have_workers_of_their_own(site: Site) -> None:
    """multiprocessing's fork: parent and children enqueue and work beside each other, and none disturbs another.

    Case 134.
    """
    script(site, FORKED)
    site.ends(timeout=30)
    assert site.accounted("completed")["completed"] == 1 + 3 * 21


LEAVING = """
with queue.work(block=False) as worker:
    while queue.stats().workers < 1:
        time.sleep(0.01)
    if os.fork() == 0:
        enqueue(Deed())
        sys.exit(0)
    _, status = os.wait()
    assert status == 0, status
    enqueue(Deed())
    while queue.stats().kinds:
        time.sleep(0.01)
"""


def test_a_child_that_leaves_the_block_of_its_parents_worker_does_not_wait_for_it(site: Site) -> None:
    """There is nothing to stop in the child; the parent's worker goes on."""
    script(site, LEAVING)
    site.ends()
    assert site.accounted("completed")["completed"] == 3


BUSY = """
sys.setswitchinterval(1e-5)
over = threading.Event()

def produce():
    while not over.is_set():
        enqueue(Deed())

def reopen():
    while not over.is_set():
        other.stats()
        other.close()

other = venturi.Queue(queue.schema)
for target in (produce, produce, produce, reopen):
    threading.Thread(target=target).start()
try:
    for number in range(60):
        if (process := os.fork()) == 0:
            faulthandler.dump_traceback_later(5, exit=True)
            enqueue(Deed())
            other.stats()
            os._exit(0)
        _, status = os.waitpid(process, 0)
        assert status == 0, status
finally:
    over.set()
queue.close()
"""


def test_a_child_that_was_forked_between_enqueues_of_other_threads_enqueues(site: Site) -> None:
    """A lock that another thread held at the fork is free in the child (case 134)."""
    script(site, BUSY)
    site.ends(timeout=60)
    assert site.accounted("pending") == {}


GREENLETS = """
from gevent import monkey
monkey.patch_all()
import time
import gevent
from faults.wsgi import Deed, enqueue, queue

ticks = []
def tick():
    while True:
        ticks.append(time.monotonic())
        gevent.sleep(0.005)

ticker = gevent.spawn(tick)
"""

TICKED = """
waits = [later - sooner for sooner, later in zip(ticks, ticks[1:])]
print("longest wait", max(waits), flush=True)
assert max(waits) < 0.5
ticker.kill()
queue.close()
"""

GEVENT = """
gevent.joinall([gevent.spawn(enqueue, Deed()) for _ in range(40)], raise_error=True)
with queue.store.borrowed(None) as conn:
    conn.execute("SELECT pg_sleep(1)")
"""

GEVENT_WORKER = """
with queue.work(block=False) as worker:
    gevent.joinall([gevent.spawn(enqueue, Deed("sleep", 0.05)) for _ in range(40)], raise_error=True)
    while queue.stats().kinds:
        gevent.sleep(0.01)
print(worker.join(), flush=True)
"""


def test_a_worker_among_greenlets_works_and_stops(site: Site) -> None:
    """Its threads are greenlets then, and so are its handlers; nothing blocks the others (case 136)."""
    pytest.importorskip("gevent")
    script(site, GREENLETS + GEVENT_WORKER + TICKED, begin="")
    site.ends()
    assert site.accounted("completed") == {"completed": 41}


def test_greenlets_enqueue_without_blocking_others(site: Site) -> None:
    """After gevent's monkey-patching the producers' side works, and waits for the server hold up no other greenlet.

    Case 136.
    """
    pytest.importorskip("gevent")
    script(site, GREENLETS + GEVENT + TICKED, begin="")
    site.ends()
    site.accounted("pending")
