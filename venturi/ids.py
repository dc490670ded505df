"""Time-ordered ids, made by the producer before any round trip (UUID version 7, RFC 9562 section 5.7)."""

from __future__ import annotations

import os
import struct
import threading
import time
import uuid

__all__ = ["uuid7", "uuid7s"]

_lock = threading.Lock()
_last = 0


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)  # another thread may have held it, and is not there to let go


def uuid7() -> uuid.UUID:
    """A new id that sorts after every id that this process made before it."""
    return uuid.UUID(int=uuid7s(1)[0])


def uuid7s(count: int) -> list[int]:
    """So many new ids in order, as numbers, all of which sort after every id that this process made before them.

    The 12 bits below the millisecond hold its fraction (RFC 9562, method 3), so that ids sort by time within a
    millisecond too; they are counted on within a batch, and where the clock stands still or steps back.
    """
    global _last
    with _lock:
        first = max(time.time_ns() * 4096 // 1_000_000, _last + 1)
        _last = first + count - 1
    tails = struct.unpack(f"!{count}Q", os.urandom(8 * count))
    return [_number(ticks, tail) for ticks, tail in enumerate(tails, first)]


def _number(ticks: int, tail: int) -> int:
    version, variant = 0x7000 | ticks & 0xFFF, 0x8000 << 48 | tail & 0x3FFF_FFFF_FFFF_FFFF
    return ticks >> 12 << 80 | version << 64 | variant
