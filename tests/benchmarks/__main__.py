"""Benchmarks: ``python -m tests.benchmarks compare --help``."""

from __future__ import annotations

import sys

from . import compare, footprint, growth, notify, retention, rounds, sizes, wal

COMMANDS = {
    "compare": compare.main,
    "rounds": rounds.main,
    "sizes": sizes.main,
    "growth": growth.main,
    "retention": retention.main,
    "notify": notify.main,
    "footprint": footprint.main,
    "wal": wal.main,
}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        sys.exit(f"usage: python -m tests.benchmarks {{{','.join(COMMANDS)}}} ...")
    COMMANDS[sys.argv[1]](sys.argv[2:])
