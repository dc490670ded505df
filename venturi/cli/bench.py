"""``venturi bench``."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import typing as t
from collections.abc import Generator

import attrs

from venturi.cli.show import table

if t.TYPE_CHECKING:
    from venturi.bench import Result

__all__ = ["bench"]


def bench(given: argparse.Namespace) -> int:
    """Measure what a queue does on a server."""
    # Imported here: it declares tasks of its own.
    from venturi.bench import Options, measure

    known = attrs.fields_dict(Options)
    options = Options(**{name: value for name, value in vars(given).items() if name in known})
    with _terminable():
        result = measure(options, lambda line: print(line, file=sys.stderr))
    if given.json:
        print(json.dumps(attrs.asdict(result)))
    else:
        _show(result)
    return 0


@contextlib.contextmanager
def _terminable() -> Generator[None]:
    """SIGTERM is an interrupt too, so that it leaves no schema behind."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _show(result: Result) -> None:
    for name, value in result.settings.items():
        print(f"{name:<20} {'-' if value is None else value}")
    print()
    rows = [
        (name, figures.get("per_s"), figures.get("p50_ms"), figures.get("p99_ms"), _compared(name, result))
        for name, figures in result.figures.items()
    ]
    table(("measure", "jobs/s", "p50 ms", "p99 ms", "compared"), rows)


def _compared(name: str, result: Result) -> str | None:
    from venturi.bench import MEASURES

    ratio = result.ratios.get(name)
    return None if ratio is None else f"{ratio:g} x {MEASURES[name].against}"
