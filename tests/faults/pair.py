"""A primary and its streaming standby."""

from __future__ import annotations

import pathlib
import shlex
import shutil
import tempfile
import time
import typing as t

import psycopg
from fixtures.waiting import eventually
from psycopg import conninfo

from venturi.embedded import binaries

__all__ = ["Node", "Pair"]


class Node:
    """One server.

    Attributes:
        dsn: Its own connection string.
        socket: The directory of its socket.
    """

    def __init__(self, folder: pathlib.Path, account: binaries.Account, programs: pathlib.Path) -> None:
        self.socket: pathlib.Path = folder / "socket"
        self.data: pathlib.Path = folder / "data"
        self.dsn: str = conninfo.make_conninfo(host=str(self.socket), port=5432, user="postgres", dbname="postgres")
        self._account = account
        self._programs = programs
        account.directory(folder)
        account.directory(self.socket)

    def run(self, program: str, *arguments: str | pathlib.Path) -> str:
        """Run one of PostgreSQL's programs."""
        return self._account.run(self._programs / program, *arguments)

    def start(self) -> None:
        """Start it; return when it takes connections."""
        options = {"listen_addresses": "", "unix_socket_directories": str(self.socket), "max_connections": "100"}
        given = shlex.join(f"--{name}={value}" for name, value in options.items())
        self.run("pg_ctl", "start", "-w", "-D", self.data, "-l", self.data / "log", "-o", given)

    def stop(self, mode: t.Literal["fast", "immediate"]) -> None:
        """Stop it, and wait until it is gone."""
        self.run("pg_ctl", "stop", "-m", mode, "-D", self.data)

    def execute(self, statement: t.LiteralString) -> list[tuple[t.Any, ...]]:
        """The rows of one statement."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []


class Pair:
    """A primary with a streaming standby, which can take its place.

    Args:
        synchronous: Whether a commit waits for the standby.

    Attributes:
        dsn: The connection string that leads to whichever takes writes.
    """

    def __init__(self, *, synchronous: bool) -> None:
        account = binaries.Account.choose()
        programs = binaries.server_binaries(account)
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="pair-", dir="/tmp"))
        self._folder.chmod(0o755)
        account.directory(self._folder / "nodes")
        self.primary, self.standby = (Node(self._folder / "nodes" / name, account, programs) for name in "ab")
        hosts = f"{self.primary.socket},{self.standby.socket}"
        self.dsn: str = conninfo.make_conninfo(self.primary.dsn, host=hosts, target_session_attrs="read-write")
        try:
            self._begin(synchronous)
        except BaseException:
            self.close()
            raise

    def _begin(self, synchronous: bool) -> None:
        auth = ("--auth-local=trust", "--auth-host=scram-sha-256")
        self.primary.run("initdb", "-D", self.primary.data, "-U", "postgres", "-E", "UTF8", "--no-locale", "-N", *auth)
        self.primary.start()
        source = ("-h", self.primary.socket, "-U", "postgres")
        self.standby.run("pg_basebackup", *source, "-D", self.standby.data, "-R", "-c", "fast", "-N")
        self.standby.start()
        streaming: t.LiteralString = "SELECT 1 FROM pg_stat_replication WHERE state = 'streaming'"
        eventually(lambda: self.primary.execute(streaming), 20, what="the standby streams")
        if synchronous:
            self.primary.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            self.primary.execute("SELECT pg_reload_conf()")
            waits: t.LiteralString = "SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'"
            eventually(lambda: self.primary.execute(waits), 20, what="commits wait for the standby")

    def deafen(self) -> None:
        """Let the standby hear nothing more from the primary."""
        self.standby.execute("ALTER SYSTEM SET primary_conninfo = ''")
        self.standby.execute("SELECT pg_reload_conf()")
        deaf: t.LiteralString = "SELECT count(*) FROM pg_stat_wal_receiver"
        eventually(lambda: self.standby.execute(deaf) == [(0,)], what="the standby hears nothing")

    def fail_over(self) -> float:
        """Crash the primary and promote the standby; when it took writes, on the monotonic clock."""
        self.primary.stop("immediate")
        return self.promote()

    def promote(self) -> float:
        """Promote the standby; when it took writes, on the monotonic clock."""
        self.standby.run("pg_ctl", "promote", "-w", "-D", self.standby.data)
        return time.monotonic()

    def close(self) -> None:
        """End both, and remove them."""
        for node in (self.primary, self.standby):
            if (node.data / "postmaster.pid").exists():
                node.stop("immediate")
        shutil.rmtree(self._folder)
