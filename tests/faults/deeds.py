"""The jobs of the fault tests, and what their handlers do to the process that runs them."""

from __future__ import annotations

import collections.abc as cabc
import contextlib
import os
import pathlib
import signal
import sys
import threading
import time
import typing as t
import uuid

import venturi

__all__ = ["Deed", "Effect", "effects", "register"]


class Effect(t.NamedTuple):
    """One line of the log of effects.

    Attributes:
        what: ``start`` or ``end`` of a run.
        at: On the machine's monotonic clock, which all processes share.
    """

    what: str
    job: uuid.UUID
    run: int
    pid: int
    at: float


@venturi.task("deed", backoff=venturi.Backoff(0.05, 0.2))
class Deed:
    """What to do.

    Attributes:
        act: A name in ACTS.
        seconds: How long, where that means something.
        once: Whether later runs than the first do nothing.
    """

    act: str = "sleep"
    seconds: float = 0.0
    once: bool = False


Context: t.TypeAlias = venturi.Context[None, t.Any]


class Rude(BaseException):
    """Raises itself whenever somebody wants to know what it has to say."""

    def __str__(self) -> str:
        raise self

    __repr__ = __str__


def _sleep(deed: Deed, ctx: Context) -> None:
    time.sleep(deed.seconds)


def _wait(deed: Deed, ctx: Context) -> None:
    ctx.cancelled.wait(deed.seconds)
    ctx.cancelled.check()


def _hang(deed: Deed, ctx: Context) -> None:
    threading.Event().wait()


def _pause(deed: Deed, ctx: Context) -> venturi.Pause | None:
    return venturi.Pause() if ctx.run_count < 3 else None


def _raise(error: cabc.Callable[[], BaseException]) -> cabc.Callable[[Deed, Context], None]:
    def act(deed: Deed, ctx: Context) -> None:
        raise error()

    return act


def _exit(deed: Deed, ctx: Context) -> None:
    os._exit(9)


def _kill(deed: Deed, ctx: Context) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fork(child: cabc.Callable[[Context], None]) -> cabc.Callable[[Deed, Context], None]:
    """A child that does this and then returns into the worker's code, as a careless handler lets it."""

    def act(deed: Deed, ctx: Context) -> None:
        if (process := os.fork()) == 0:
            child(ctx)
            return
        deadline = time.monotonic() + 10
        while os.waitpid(process, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                raise venturi.PermanentError("the child lives on")
            time.sleep(0.01)

    return act


def _enqueue(ctx: Context) -> None:
    ctx.state.enqueue(Deed())


ACTS: dict[str, cabc.Callable[[Deed, Context], venturi.Outcome]] = {
    "sleep": _sleep,
    "wait": _wait,
    "hang": _hang,
    "pause": _pause,
    "exit": _exit,
    "kill": _kill,
    "fail": _raise(lambda: RuntimeError("as told")),
    "permanent": _raise(lambda: venturi.PermanentError("as told")),
    "huge": _raise(lambda: RuntimeError("x" * 50_000_000)),
    "SystemExit": _raise(lambda: SystemExit(3)),
    "KeyboardInterrupt": _raise(KeyboardInterrupt),
    "GeneratorExit": _raise(GeneratorExit),
    "BaseException": _raise(lambda: BaseException("base")),
    "Rude": _raise(Rude),
    "fork and leave": _fork(lambda ctx: os._exit(0)),
    "fork and return": _fork(lambda ctx: None),
    "fork and exit": _fork(lambda ctx: sys.exit(0)),
    "fork and enqueue": _fork(_enqueue),
}


def register(queue: venturi.Queue[t.Any], log: pathlib.Path) -> None:
    """Make the queue run deeds, and write their starts and ends to the log, which all processes share."""
    handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(what: str, ctx: Context) -> None:
        os.write(handle, f"{what} {ctx.id} {ctx.run_count} {os.getpid()} {time.monotonic()}\n".encode())

    @queue.handler
    def deed(task: Deed, ctx: Context) -> venturi.Outcome:
        note("start", ctx)
        idle = task.once and ctx.run_count > 1
        outcome = None if idle else ACTS[task.act](task, ctx)
        note("end", ctx)
        return outcome


def effects(log: pathlib.Path) -> list[Effect]:
    """What the log says."""
    with contextlib.suppress(FileNotFoundError):
        rows = (line.split() for line in log.read_text().splitlines())
        return [Effect(row[0], uuid.UUID(row[1]), int(row[2]), int(row[3]), float(row[4])) for row in rows]
    return []
