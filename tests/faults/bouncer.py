"""A real PgBouncer in front of a server."""

from __future__ import annotations

import functools
import pathlib
import re
import shutil
import socket
import subprocess
import tempfile

import psycopg
from fixtures.waiting import eventually
from psycopg import conninfo

from venturi.embedded import binaries

__all__ = ["MISSING", "Bouncer", "version"]

PROGRAM = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin")
MISSING = "PgBouncer is not installed: apt-get install pgbouncer"


@functools.cache
def version() -> tuple[int, int]:
    """The version on this machine; (0, 0): none."""
    if PROGRAM is None:
        return 0, 0
    words = subprocess.run([PROGRAM, "--version"], capture_output=True, text=True, check=True).stdout
    major, minor = re.findall(r"\d+", words)[:2]
    return int(major), int(minor)


class Bouncer:
    """PgBouncer in transaction mode, with its own defaults for everything that is not given.

    Args:
        dsn: The server's, with the role that all sessions have.
        settings: Of PgBouncer.

    Attributes:
        dsn: The connection string that leads through it.
    """

    def __init__(self, dsn: str, **settings: str | int) -> None:
        server = conninfo.conninfo_to_dict(dsn)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.dsn: str = conninfo.make_conninfo(dsn, host="127.0.0.1", port=port)
        self._account = binaries.Account.choose()
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="bouncer-", dir="/tmp"))
        self._folder.chmod(0o755)
        self._configuration = self._folder / "pgbouncer.ini"
        target = " ".join(f"{name}={server[name]}" for name in ("host", "port", "user"))
        lines = {"listen_addr": "127.0.0.1", "listen_port": port, "unix_socket_dir": "", "auth_type": "any"}
        lines |= {"pool_mode": "transaction", **settings}
        body = "".join(f"{name} = {value}\n" for name, value in lines.items())
        self._configuration.write_text(f"[databases]\n* = {target}\n[pgbouncer]\n{body}")
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        assert PROGRAM is not None
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [PROGRAM, self._configuration],
                stdout=log,
                stderr=log,
                user=self._account.uid,
                group=self._account.gid,
                extra_groups=None if self._account.uid is None else [],
            )
        eventually(self._answers, 10, what="PgBouncer answers")

    def kill(self) -> None:
        """Kill it with all connections, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """End it for good."""
        self.kill()
        shutil.rmtree(self._folder)

    def _answers(self) -> bool:
        try:
            psycopg.connect(self.dsn, connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True
