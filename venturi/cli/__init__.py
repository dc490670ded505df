"""The command line: ``venturi``, or ``python -m venturi``.

Exit codes: 0 done, 1 an expected error, told in one line, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

import psycopg
from psycopg_pool import PoolTimeout

from venturi.cli.errors import tell
from venturi.cli.parser import parser
from venturi.errors import VenturiError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: Default: None, those of the process.

    Returns:
        The exit code. Wrong usage ends in SystemExit(2), as argparse does.
    """
    _write_anything()
    try:
        given = parser().parse_args(arguments)
        code: int = given.run(given)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever read the output has gone; the interpreter's own flush at exit must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except (VenturiError, psycopg.Error, PoolTimeout, OSError) as error:
        tell(error)
        return 1


def _write_anything() -> None:
    """Text of jobs is of any kind, and a terminal may not know all of it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
