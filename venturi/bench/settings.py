"""What a figure depends on besides the code: the machine, the server, and how durable its commits are."""

from __future__ import annotations

import os
import platform

from venturi.store.connections import Connection, run

__all__ = ["describe"]

_SERVER = b"""
    SELECT name, current_setting(name)
    FROM unnest(ARRAY['server_version', 'fsync', 'synchronous_commit', 'full_page_writes', 'shared_buffers',
                      'wal_level']) AS name
"""


def describe(connection: Connection) -> dict[str, object]:
    """The machine of this process, and the server's version and durability settings, by their names.

    Args:
        connection: To the server; nothing is changed there.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    settings: dict[str, object] = dict(run(connection, _SERVER).fetchall())
    return {
        "cores": os.cpu_count(),
        "memory": f"{memory:.1f} GiB",
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "postgresql": settings.pop("server_version"),
        **settings,
    }
