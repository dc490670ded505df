"""A worker thread in each process of a WSGI server, which forks, reloads, stops and is killed."""

from __future__ import annotations

import collections.abc as cabc
import contextlib
import os
import pathlib
import signal
import sys

import pytest
from faults.crew import done
from faults.site import Site
from fixtures.waiting import eventually

pytestmark = pytest.mark.faults

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "gunicorn_conf.py"


@pytest.fixture
def site(dsn: str, schema: str, tmp_path: pathlib.Path) -> cabc.Iterator[Site]:
    """A server with an application that enqueues; its processes are killed after the test."""
    site = Site(dsn, schema, tmp_path)
    yield site
    site.close()


def gunicorn(site: Site, *, kind: str = "gthread", **settings: object) -> None:
    """Start gunicorn with the configuration of the examples, and wait until its processes serve and work."""
    (site.folder / "flask_app.py").write_text("from faults.wsgi import app, queue\n")
    settings |= {"worker_class": kind, "threads": 4 if kind == "gthread" else 1, "control_socket_disable": True}
    changes = "\n".join(f"{name} = {value!r}" for name, value in settings.items())
    (site.folder / "conf.py").write_text(f"{EXAMPLE.read_text()}\n{changes}\n")
    site.start("-m", "gunicorn", "--bind", f"127.0.0.1:{site.port}", "--config", "conf.py", "flask_app:app")
    site.serves(workers=2)


def requests(site: Site, count: int = 20) -> set[int]:
    """Enqueue through the requests' own connections and the queue's pool; the processes that answered."""
    return {site.ask(("/conn", "/pool")[number % 2])["pid"] for number in range(count)}


def reloaded_and_ended(site: Site, end: signal.Signals) -> set[str]:
    """Change the processes by SIGHUP and end them, each time while a job runs; the jobs that ran."""
    first = site.working()
    requests(site)
    job = site.ask("/pool?seconds=2")["job"]
    assert site.begun(job).pid in first
    site.process.send_signal(signal.SIGHUP)
    eventually(lambda: len(site.working() - first) == 2 and not site.pids() & first, 15, what="the reload is over")
    assert requests(site) <= site.working()
    running = site.ask("/conn?seconds=1")["job"]
    site.begun(running)
    site.process.send_signal(end)
    site.ends()
    return {job, running}


KINDS = [("sync", True), ("sync", False), ("gthread", True), ("gthread", False)]


@pytest.mark.parametrize(("kind", "preload"), KINDS)
def test_gunicorn_reloads_and_stops_in_order(site: Site, kind: str, preload: bool) -> None:
    """SIGHUP changes the processes and SIGTERM ends them; running jobs are completed and none stays claimed.

    Case 134.
    """
    gunicorn(site, kind=kind, preload_app=preload)
    jobs = reloaded_and_ended(site, signal.SIGTERM)
    outcomes = site.accounted()
    assert set(outcomes) <= {"completed", "released"}
    assert {str(each.job) for each in site.effects() if each.what == "end"} >= jobs


@pytest.mark.parametrize("kind", ["sync", "gthread"])
def test_gunicorn_told_to_stop_at_once_gives_the_jobs_back(site: Site, kind: str) -> None:
    """SIGQUIT waits for no handler; for the thread of one that never ends, until gunicorn's patience is over."""
    gunicorn(site, kind=kind, graceful_timeout=4)
    requests(site, 4)
    polite = site.ask("/pool?act=wait&seconds=60")["job"]
    stuck = site.ask("/pool?act=hang")["job"]
    site.begun(polite)
    site.begun(stuck)
    site.process.send_signal(signal.SIGQUIT)
    eventually(lambda: site.claimed() == 0, 2, what="all jobs are given back")
    site.ends()
    assert site.accounted("completed", "pending")["released"] >= 2


def test_gunicorn_gives_the_jobs_back_of_a_process_whose_request_hangs(site: Site) -> None:
    """A process that is aborted after gunicorn's timeout does not wait for its handlers until it is killed."""
    gunicorn(site, kind="sync", timeout=2)
    job = site.ask("/pool?act=hang&once=1")["job"]
    aborted = site.begun(job).pid
    while True:
        with contextlib.suppress(OSError):
            site.ask("/hang")
        if aborted not in site.pids():
            break
    done(site.dsn, site.schema)
    site.process.send_signal(signal.SIGTERM)
    site.ends(complaints=())
    assert site.accounted("completed")["released"] == 1


def test_gunicorn_replaces_a_killed_process_and_its_jobs_run_again(site: Site) -> None:
    """After kill -9 of one process the others recover its claims, and the new one works beside them."""
    gunicorn(site)
    requests(site)
    job = site.ask("/pool?act=hang&once=1")["job"]
    doomed = site.begun(job).pid
    os.kill(doomed, signal.SIGKILL)
    eventually(lambda: len(site.working()) == 2 and doomed not in site.working(), 15, what="it is replaced")
    requests(site)
    done(site.dsn, site.schema)
    site.process.send_signal(signal.SIGTERM)
    site.ends()
    assert site.accounted("completed")["recovered"] == 1


@pytest.mark.parametrize("kind", ["sync", "gthread"])
def test_gunicorn_without_its_master_stops_in_order(site: Site, kind: str) -> None:
    """After kill -9 of the master its processes notice within half the timeout, and end as when they are told."""
    gunicorn(site, kind=kind, timeout=6)
    requests(site)
    job = site.ask("/pool?seconds=1")["job"]
    site.begun(job)
    site.process.kill()
    site.ends(-signal.SIGKILL)
    site.accounted()
    assert job in {str(each.job) for each in site.effects() if each.what == "end"}


SERVERS = {
    "waitress": "waitress.serve(app, listen='127.0.0.1:{port}', threads=4, _quiet=True)",
    "werkzeug.serving": "werkzeug.serving.run_simple('127.0.0.1', {port}, app, threaded=True)",  # Flask's app.run()
}


def beside(site: Site, server: str) -> None:
    """Start a server inside the README's block for a worker beside it, and wait until it serves."""
    pytest.importorskip(server)
    told = (ROOT / "README.md").read_text().partition("In a thread beside a WSGI application")[2]
    program = told.split("```")[1].removeprefix("python\n")
    for line, instead in (("print(worker)", SERVERS[server].format(port=site.port)), ("venturi.work(", "queue.work(")):
        assert line in program, program
        program = program.replace(line, instead)
    (site.folder / "serve.py").write_text(f"import {server}\nfrom faults.wsgi import app, queue\n\n{program}")
    site.start("serve.py")
    site.serves(workers=1)


# Where SIGINT is a KeyboardInterrupt that the server lets through, the block ends too, but with a traceback.
ENDS = [*((server, signal.SIGTERM) for server in SERVERS), ("waitress", signal.SIGINT)]


@pytest.mark.parametrize(("server", "number"), ENDS)
def test_a_server_of_one_process_stops_in_order(site: Site, server: str, number: signal.Signals) -> None:
    """One worker beside it, as the README says: it completes what it runs before the program ends."""
    beside(site, server)
    requests(site)
    job = site.ask("/conn?seconds=1")["job"]
    site.begun(job)
    site.process.send_signal(number)
    site.ends()
    site.accounted()
    assert job in {str(each.job) for each in site.effects() if each.what == "end"}


def test_a_killed_waitress_leaves_its_claims_to_the_next_one(site: Site) -> None:
    """kill -9, and the next start: every job is completed."""
    beside(site, "waitress")
    requests(site)
    site.begun(site.ask("/pool?act=hang&once=1")["job"])
    site.process.kill()
    site.ends(-signal.SIGKILL)
    beside(site, "waitress")
    done(site.dsn, site.schema)
    site.process.send_signal(signal.SIGTERM)
    site.ends()
    assert site.accounted("completed")["recovered"] >= 1


UWSGI_APP = """
import uwsgi
from uwsgidecorators import postfork
from faults.wsgi import app, queue

def begin_work():
    queue.work(block=False)

# A lazy application is imported after the fork, when uWSGI has called what is to be called then.
begin_work() if "lazy-apps" in uwsgi.opt else postfork(begin_work)
"""


def uwsgi(site: Site, *options: str) -> None:
    """Start uWSGI, and wait until its processes serve and work."""
    program = pathlib.Path(sys.executable).with_name("uwsgi")
    if not program.exists():
        pytest.skip("no uWSGI beside this Python: install uwsgi, which needs a compiler, or pyuwsgi")
    (site.folder / "uwsgi_app.py").write_text(UWSGI_APP)
    address = f"127.0.0.1:{site.port}"
    server = ["--http-socket", address, "--master", "--enable-threads", "--need-app", "--module", "uwsgi_app:app"]
    if program.read_bytes().startswith(b"#!"):
        # pyuwsgi reloads by the Python that it finds behind the links of a virtual environment.
        server += ["--binary-path", sys.executable]
    site.start(program, *server, "--processes=2", "--threads=2", "--worker-reload-mercy=10", *options)
    site.serves(workers=2)


@pytest.mark.parametrize("options", [[], ["--lazy-apps"]], ids=["prefork", "lazy"])
def test_uwsgi_reloads_and_stops_in_order(site: Site, options: list[str]) -> None:
    """SIGHUP changes the processes and SIGINT ends them: Python's own end stops the worker in each of them."""
    uwsgi(site, *options)
    jobs = reloaded_and_ended(site, signal.SIGINT)
    site.accounted()
    assert {str(each.job) for each in site.effects() if each.what == "end"} >= jobs


def test_uwsgi_replaces_a_killed_process_and_its_jobs_run_again(site: Site) -> None:
    """After kill -9 of one process the other recovers its claims, and the new one works beside it."""
    uwsgi(site)
    requests(site)
    doomed = site.begun(site.ask("/pool?act=hang&once=1")["job"]).pid
    os.kill(doomed, signal.SIGKILL)
    eventually(lambda: len(site.working()) == 2 and doomed not in site.working(), 15, what="it is replaced")
    requests(site)
    done(site.dsn, site.schema)
    site.process.send_signal(signal.SIGINT)
    site.ends()
    assert site.accounted("completed")["recovered"] >= 1


def test_uwsgi_without_its_master_leaves_its_claims_to_the_next_one(site: Site) -> None:
    """After kill -9 of the master its processes end themselves, and the next start has their jobs."""
    uwsgi(site)
    requests(site)
    site.begun(site.ask("/pool?act=hang&once=1")["job"])
    site.process.kill()
    site.ends(-signal.SIGKILL)
    uwsgi(site)
    done(site.dsn, site.schema)
    site.process.send_signal(signal.SIGINT)
    site.ends()
    site.accounted("completed")
