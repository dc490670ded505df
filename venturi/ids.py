"""Time-ordered ids, made by the producer before any round trip (UUID version 7, RFC 9562 section 5.7)."""

from __future__ import annotations

import os
import threading
import time
import uuid

__all__ = ["uuid7"]

_lock = threading.Lock()
_last = 0
_random = memoryview(b"")
_pid = 0

_BLOCK = 4096


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)  # another thread may have held it, and is not there to let go


def uuid7() -> uuid.UUID:
    """A new id that sorts after every id that this process made before it.

    The 12 bits below the millisecond hold its fraction (RFC 9562, method 3), so that ids sort by time within a
    millisecond too; they are counted on where the clock stands still or steps back.
    """
    global _last, _random, _pid
    ticks = time.time_ns() * 4096 // 1_000_000
    with _lock:
        _last = ticks = max(ticks, _last + 1)
        # The operating system's randomness in blocks, since asking for it costs more than all the rest; a forked
        # child must not go on with its parent's block.
        if not _random or _pid != os.getpid():
            _random, _pid = memoryview(os.urandom(_BLOCK)), os.getpid()
        drawn, _random = _random[:8], _random[8:]
    milliseconds, fraction = ticks >> 12, ticks & 0xFFF
    tail = int.from_bytes(drawn, "big") & 0x3FFF_FFFF_FFFF_FFFF
    return uuid.UUID(int=milliseconds << 80 | 0x7000 << 64 | fraction << 64 | 0x8000 << 48 | tail)
