"""Starts and stops one server in one folder; see `venturi.embedded.guard` for the locks that make it safe."""

from __future__ import annotations

import collections.abc as cabc
import fcntl
import hashlib
import os
import pathlib
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import time
import typing as t

import psycopg
from psycopg import conninfo, sql

from venturi.embedded import binaries, guard
from venturi.errors import ConfigError, VenturiError

__all__ = ["Server", "fits", "socket_directory"]

Mode: t.TypeAlias = t.Literal["fast", "immediate"]

_PATIENCE = 60.0
"""Seconds for the server to start, recovery after a crash included."""

_SIGNALS = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}


class Server:
    """A private server; made, and ended, by `venturi.embedded.server`.

    Attributes:
        dsn: Its connection string, for the superuser and the database ``postgres``.
        folder: The directory that holds its data and locks.
        log: The file that it writes its log to.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        programs: pathlib.Path,
        account: binaries.Account,
        *,
        tcp: bool,
        settings: cabc.Mapping[str, str],
    ) -> None:
        self.folder = folder
        self.log: pathlib.Path = folder / "data" / "server.log"
        self._account = account
        self._programs = programs
        self._socket = socket_directory(folder)
        self._password = secrets.token_urlsafe() if tcp else None
        self._settings = {
            "port": str(_free_port() if tcp else 5432),
            "listen_addresses": "127.0.0.1" if tcp else "",
            "unix_socket_directories": str(self._socket),
            **settings,
        }
        self._local = conninfo.make_conninfo(
            host=str(self._socket), port=self._settings["port"], user="postgres", dbname="postgres"
        )
        remote = {"host": "127.0.0.1", "password": self._password} if tcp else {}
        self.dsn: str = conninfo.make_conninfo(self._local, **remote)

    def __repr__(self) -> str:
        state = f"process {guard.postmaster(self.folder)}" if guard.alive(self.folder) else "stopped"
        return f"<venturi.embedded.Server {self.folder} {state}>"

    @property
    def pid(self) -> int:
        """The id of the server's first process, for tests that send signals to it.

        Raises:
            VenturiError: It is not running.
        """
        process = guard.postmaster(self.folder)
        if process is None or not guard.alive(self.folder):
            raise VenturiError(f"the server in {self.folder} is not running")
        return process

    def start(self) -> None:
        """Start the server unless it runs already, and return when it takes connections.

        Raises:
            ConfigError: Its data was made by another major version of PostgreSQL.
            VenturiError: It does not start; the message ends with the last lines of its log.
        """
        with guard.locked(self.folder / "start", fcntl.LOCK_EX):
            launched, deadline = False, time.monotonic() + _PATIENCE
            while not self._answers():
                # What is alive without an answer is starting, or the rest of a server that was killed.
                if not guard.alive(self.folder) and not launched:
                    self._launch()
                    launched = True
                elif not guard.alive(self.folder) or time.monotonic() > deadline:
                    raise VenturiError(f"the server in {self.folder} does not start: {self._last_words()}")
                time.sleep(0.01)

    def stop(self, mode: Mode = "fast") -> None:
        """Stop the server and return when none of its processes is left; `start` starts it again.

        Args:
            mode: ``fast`` ends every session and shuts down in order, ``immediate`` is a crash, with a recovery at the
                next start. A server that does not heed it in 10 seconds is stopped harder. Default: ``fast``.

        Raises:
            ConfigError: There is no such mode.
            VenturiError: It does not stop.
        """
        if mode not in _SIGNALS:
            raise ConfigError(f"mode={mode!r}: must be one of {', '.join(_SIGNALS)}")
        if not guard.stop(self.folder, _SIGNALS[mode]):
            raise VenturiError(f"the server in {self.folder} does not stop")

    def _answers(self) -> bool:
        # Asked earlier, it would refuse, and log that as an error.
        if guard.pid_file(self.folder)[7:8] != ["ready   "]:
            return False
        try:
            with psycopg.connect(self._local, autocommit=True, connect_timeout=5) as connection:
                if self._password:
                    connection.execute(sql.SQL("ALTER ROLE postgres PASSWORD {}").format(self._password))
        except psycopg.OperationalError:
            return False
        return True

    def _launch(self) -> None:
        data = self.folder / "data"
        options = shlex.join(f"--{name}={value}" for name, value in self._settings.items())
        with guard.locked(self.folder / "alive", fcntl.LOCK_SH) as alive:
            if not data.exists():
                self._initialise(data, alive)
            self._check_version(data)
            self._forget_the_dead()
            self._account.directory(self._socket)
            self._run(alive, "pg_ctl", "start", "--no-wait", "-D", data, "-l", self.log, "-o", options)

    def _initialise(self, data: pathlib.Path, alive: int) -> None:
        making = self.folder / "data.new"
        shutil.rmtree(making, ignore_errors=True)
        self._account.directory(making)
        sync = ["--no-sync"] if self._settings.get("fsync") == "off" else []
        auth = ("--auth-local=trust", "--auth-host=scram-sha-256")
        self._run(alive, "initdb", "-D", making, "-U", "postgres", "-E", "UTF8", "--no-locale", *auth, *sync)
        making.rename(data)

    def _check_version(self, data: pathlib.Path) -> None:
        made, ours = int((data / "PG_VERSION").read_text()), binaries.major(self._programs)
        if made != ours:
            raise ConfigError(
                f"{data} was made by PostgreSQL {made} and cannot be used by {ours}: "
                f"remove it, install PostgreSQL {made}, or take another name"
            )

    def _forget_the_dead(self) -> None:
        # None of our processes is alive, but PostgreSQL would not start while anything has the id that it wrote down: a
        # stranger, or its own remains until their parent has noticed. A server that others started here is left alone.
        process = guard.postmaster(self.folder)
        if process is None or not pathlib.Path("/proc/self/stat").exists():
            return
        try:
            running = re.match(r"\d+ \(postgres\) [^Z]", pathlib.Path(f"/proc/{process}/stat").read_text())
        except (FileNotFoundError, ProcessLookupError):
            running = None
        if not running:
            (self.folder / "data" / "postmaster.pid").unlink(missing_ok=True)

    def _run(self, alive: int, program: str, *arguments: str | pathlib.Path) -> None:
        try:
            self._account.run(self._programs / program, *arguments, keep=(alive,))
        except subprocess.CalledProcessError as error:
            raise VenturiError(f"{program} failed for {self.folder}: {error.stdout}") from error

    def _last_words(self) -> str:
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-10:])
        except FileNotFoundError:
            return "it has no log"


def socket_directory(folder: pathlib.Path) -> pathlib.Path:
    """Where the server of a folder has its socket: in the folder, or below /tmp where the path would be too long."""
    inside = folder / "socket"
    return inside if fits(inside) else pathlib.Path("/tmp", f"venturi-{hashlib.sha256(bytes(folder)).hexdigest()[:16]}")


def fits(directory: pathlib.Path) -> bool:
    """Whether a socket in that directory has a path of less than 100 bytes, which every system takes."""
    return len(os.fsencode(directory / ".s.PGSQL.65535")) < 100


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
