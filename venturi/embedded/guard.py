"""Ends a private server when its last user is gone, in a process of its own that no death of a user can keep from it.

Three files in a server's folder are locked with flock, which the kernel undoes however a process ends:

- ``users``: shared, by every process that uses the server; exclusive, by a guard that ends it.
- ``alive``: shared, by every process of the server itself, which inherit it; free means that none is left.
- ``start``: exclusive, by the one that is starting the server.

A user first takes ``users``, then launches a guard, and then starts the server unless it runs already. So a guard is
there before there is anything to end, and killing a user at any later step leaves nothing behind; killing it in the
moment before leaves an empty directory. A user that comes while a guard ends the server waits for ``users``, and then
starts the server anew. Several guards do no harm: the last ones find nothing to do.

A guard runs this file by its path with nothing but the standard library, so that it is there within milliseconds.
"""

from __future__ import annotations

import collections.abc as cabc
import contextlib
import fcntl
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

__all__ = ["alive", "locked", "main", "pid_file", "postmaster", "stop"]


@contextlib.contextmanager
def locked(path: pathlib.Path, how: int) -> cabc.Generator[int]:
    """Hold a lock on a file, which is made where it is missing.

    Args:
        path: The file.
        how: ``fcntl.LOCK_SH`` or ``LOCK_EX``, with ``LOCK_NB`` to raise BlockingIOError instead of waiting.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, how)
        yield handle
    finally:
        # Closed, not unlocked: a process that inherited the handle keeps the lock.
        os.close(handle)


def alive(folder: pathlib.Path) -> bool:
    """Whether any process of the server is left."""
    try:
        with locked(folder / "alive", fcntl.LOCK_EX | fcntl.LOCK_NB):
            return False
    except BlockingIOError:
        return True


def pid_file(folder: pathlib.Path) -> list[str]:
    """The lines that the server wrote down about itself: its process first, its state last. Old ones may outlive it."""
    try:
        return (folder / "data" / "postmaster.pid").read_text().split("\n")
    except FileNotFoundError:
        return []


def postmaster(folder: pathlib.Path) -> int | None:
    """The server's first process. None: it wrote none down, or not yet to the end."""
    lines = pid_file(folder)
    return int(lines[0]) if len(lines) > 1 else None


def stop(folder: pathlib.Path, how: signal.Signals, patience: float = 10.0) -> bool:
    """Stop the server with a signal, and when the patience runs out as in a crash, and then by killing it.

    Args:
        folder: The server's.
        how: The first signal to its postmaster.
        patience: Seconds for each try. Default: 10.

    Returns:
        Whether no process of the server is left.
    """
    for harder in (how, signal.SIGQUIT, signal.SIGKILL):
        asked, deadline = None, time.monotonic() + patience
        while alive(folder):
            if time.monotonic() > deadline:
                break
            if (process := postmaster(folder)) and process != asked:
                _signal(folder, process, harder)
                asked = process
            time.sleep(0.01)
        else:
            return True
    return False


def _signal(folder: pathlib.Path, process: int, how: signal.Signals) -> None:
    # As the server's account, since that account could have written any number into the file.
    account = (folder / "data").stat().st_uid if os.geteuid() == 0 else None
    # A paused process heeds a signal when it is told to go on.
    script = f"kill -{how.value} {process}; kill -{signal.SIGCONT.value} {process}"
    subprocess.run(["/bin/sh", "-c", script], user=account, cwd="/", stderr=subprocess.DEVNULL, check=False)


def main(folder: str, how: str, *doomed: str) -> None:
    """Leave the caller, wait until the server has no user, stop it with a signal, and remove the directories named."""
    if os.fork():
        os._exit(0)
    with locked(pathlib.Path(folder, "users"), fcntl.LOCK_EX):
        stop(pathlib.Path(folder), signal.Signals[how])
        for path in doomed:
            shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
