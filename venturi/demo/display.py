"""What is seen while the demo works: a live bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import os
import time
import typing as t
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import attrs

__all__ = ["Progress", "Show", "display", "listed", "printable", "shown"]

EXAMPLES = 8
"""How many failures are listed."""

LINE_SECONDS = 2.0
"""Between two plain lines."""


@attrs.frozen
class Progress:
    """How far the work is.

    Attributes:
        found: Files found so far; more while the folder is still read.
        rate: Files a second, since this process began.
    """

    found: int
    done: int
    dead: int
    retried: int
    workers: int
    rate: float

    def __str__(self) -> str:
        workers = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        return (
            f"{self.done} of {self.found} files, {self.rate:.0f}/s, {self.retried} retried, {self.dead} dead, {workers}"
        )


Show: t.TypeAlias = Callable[[Progress], None]


@contextmanager
def display(terminal: bool) -> Generator[Show]:
    """Gives the function that shows progress; rich draws it where it is installed and there is a terminal."""
    if not terminal:
        yield _lines()
        return
    try:
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar
    except ImportError:
        yield _lines()
        return
    with Bar(TextColumn("{task.description}"), BarColumn(16), TimeElapsedColumn(), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda progress: bar.update(
            task, description=str(progress), completed=progress.done + progress.dead, total=progress.found or None
        )


def _lines() -> Show:
    due = 0.0

    def show(progress: Progress) -> None:
        nonlocal due
        if time.monotonic() >= due:
            print(progress, flush=True)
            due = time.monotonic() + LINE_SECONDS

    return show


def listed(what: str, failures: Sequence[tuple[str, str]]) -> list[str]:
    """Failures in lines: how many there are, and the file and the reason of the first ones."""
    lines = [f"\n{len(failures)} {what}" + (":" if failures else "")]
    lines += [f"  {file}: {printable(reason)}" for file, reason in failures[:EXAMPLES]]
    if len(failures) > EXAMPLES:
        lines.append(f"  and {len(failures) - EXAMPLES} more")
    return lines


def shown(path: bytes) -> str:
    """A path as text for people."""
    return printable(os.fsdecode(path))


def printable(text: str) -> str:
    """The text, with what a terminal could not print or would obey escaped."""
    return text if text.isprintable() else ascii(text)[1:-1]
