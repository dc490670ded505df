"""A PostgreSQL server of one's own for tests and demos: started here, and gone with the processes that use it.

`server()` gives a throw-away server, `server("demo")` one that keeps its data, and `database()` the connection string
of the first there is of an explicit one, the programs of the extra ``embedded`` and a PostgreSQL on the machine.

It works on Linux and macOS, as root and as an ordinary user. The server listens on a socket in a directory that only
its account and root can enter, and so needs no password. For root it runs as ``postgres``, ``nobody`` or the user id
65534; no account is made and no directory of others is opened up. Where that account cannot reach the programs, they
are copied to /var/cache/venturi.

The process that asked for a server, and those that it forks, are its users. It ends with the last of them, even a
killed one; `venturi.embedded.guard` says how.
"""

from __future__ import annotations

import collections.abc as cabc
import contextlib
import fcntl
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

from venturi.embedded import binaries, guard
from venturi.embedded.launcher import Server, fits, socket_directory
from venturi.errors import ConfigError, VenturiError

__all__ = ["Server", "database", "server"]

_CARELESS = {"fsync": "off", "full_page_writes": "off"}
"""Settings of throw-away servers: their data outlives a crash of the server, but not one of the machine."""


def explicit(dsn: str | None) -> str | None:
    """The connection string that was asked for; None: a private server is to be used."""
    return dsn or os.environ.get("VENTURI_DATABASE_URL") or os.environ.get("DATABASE_URL")


@contextlib.contextmanager
def database(dsn: str | None = None, *, name: str | None = None) -> cabc.Generator[str]:
    """The connection string of the first there is: an explicit one, the embedded server's, an installed PostgreSQL's.

    Args:
        dsn: An explicit connection string. Default: None, VENTURI_DATABASE_URL, else DATABASE_URL, else a private
            server's.
        name: Name of the private server, which keeps its data. Default: None, a throw-away one.

    Raises:
        ConfigError: There is none; the message names every way to one.
        VenturiError: The private server does not start.
    """
    if given := explicit(dsn):
        yield given
        return
    with server(name) as private:
        yield private.dsn


@contextlib.contextmanager
def server(
    name: str | None = None,
    *,
    directory: str | os.PathLike[str] | None = None,
    tcp: bool = False,
    settings: cabc.Mapping[str, str] | None = None,
) -> cabc.Generator[Server]:
    """A private server, started, or found running by its name, and ended with its last user.

    Args:
        name: Letters, digits, ``-`` and ``_``. A server with a name keeps its data and is shared by all who name it; it
            has PostgreSQL's own settings. Default: None, a throw-away server, which leaves nothing behind and does not
            wait for the disk.
        directory: The directory that holds the folders of named servers. Default: None, ``venturi`` in XDG_DATA_HOME or
            ~/.local/share, and for root /var/lib/venturi, as the server's account could not enter root's home.
        tcp: Listen on a free port of 127.0.0.1 as well, with a password that is in the connection string. Not for
            named servers. Default: False.
        settings: Settings of PostgreSQL, which apply if the server is started here. Default: None, no others.

    Raises:
        ConfigError: No PostgreSQL is found, or it cannot be used with this name or directory.
        VenturiError: The server does not start, or a throw-away one is not gone a minute after its use.
    """
    if name is not None and tcp:
        raise ConfigError(f"tcp={tcp!r}: must be False for the named server {name!r}")
    account = binaries.Account.choose()
    programs = binaries.server_binaries(account)
    folder = _fresh(account) if name is None else _kept(name, directory, account)
    with _used(folder, keep=name is not None):
        careless = _CARELESS if name is None else {}
        private = Server(folder, programs, account, tcp=tcp, settings={**careless, **(settings or {})})
        private.start()
        yield private


def _fresh(account: binaries.Account) -> pathlib.Path:
    for base in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        if fits(pathlib.Path(base, "venturi-12345678", "socket")) and account.can("test", "-x", base):
            folder = pathlib.Path(tempfile.mkdtemp(prefix="venturi-", dir=base))
            folder.chmod(0o711)
            return folder
    raise ConfigError(f"{tempfile.gettempdir()} has too long a path or is closed to the server's account: set TMPDIR")


def _kept(name: str, directory: str | os.PathLike[str] | None, account: binaries.Account) -> pathlib.Path:
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise ConfigError(f"name={name!r}: must be letters, digits, - and _")
    parent = _home() if directory is None else pathlib.Path(directory).absolute()
    parent.mkdir(parents=True, exist_ok=True)
    folder = parent / name
    folder.mkdir(exist_ok=True)
    folder.chmod(0o711)
    if not account.can("test", "-x", folder):
        raise ConfigError(f"directory={parent}: closed to the user with id {account.uid}, as which the server runs")
    return folder


def _home() -> pathlib.Path:
    if os.geteuid() == 0:
        binaries.public(home := pathlib.Path("/var/lib/venturi"))
        return home
    return pathlib.Path(os.environ.get("XDG_DATA_HOME") or pathlib.Path.home() / ".local" / "share", "venturi")


@contextlib.contextmanager
def _used(folder: pathlib.Path, *, keep: bool) -> cabc.Generator[None]:
    how, doomed = (signal.SIGINT, socket_directory(folder)) if keep else (signal.SIGQUIT, folder)
    with guard.locked(folder / "users", fcntl.LOCK_SH) as users:
        _launch_guard(folder, how.name, doomed)
        user = os.getpid()
        try:
            yield
        finally:
            # A child that was forked shares the lock, and must not give it back for its parent.
            if os.getpid() == user:
                fcntl.flock(users, fcntl.LOCK_UN)
                if not keep:
                    _await_removal(folder)


def _launch_guard(*arguments: str | pathlib.Path) -> None:
    null = subprocess.DEVNULL
    command = (sys.executable, "-I", "-S", guard.__file__, *arguments)
    subprocess.run(command, check=True, cwd="/", stdin=null, stdout=null, stderr=null, start_new_session=True)


def _await_removal(folder: pathlib.Path) -> None:
    deadline = time.monotonic() + 60
    while folder.exists():
        if time.monotonic() > deadline:
            raise VenturiError(f"the server in {folder} is not gone after a minute")
        time.sleep(0.005)
