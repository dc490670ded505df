"""The worker's own threads: each repeats one step, survives what a step raises, and fails loudly when every step
does.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

import psycopg

from venturi.errors import ConfigError, SchemaError
from venturi.log import Log, log
from venturi.store.connections import Session
from venturi.worker.outages import Outages, Retry, describe

__all__ = ["Part", "spawn"]

logger: Log = log("venturi.worker")

FOLLOWING = 15.0
"""Seconds between the tries of a part while the coordinator tries too."""

FOR_GOOD = 10
"""Steps in a row that fail for another reason than the database, after which a part has failed for good."""


class Part:
    """A part of the worker with a session of its own that repeats `step`, on a thread or in the caller's.

    Args:
        name: Of the part.
        connect: Opens its session.
        outages: Shared by the worker's parts.
        retry: Its waits after trouble.
    """

    def __init__(self, name: str, connect: Callable[[], Session], outages: Outages, retry: Retry) -> None:
        self.name = name
        self._connect = connect
        self._outages = outages
        self._retry = retry
        self._session: Session | None = None
        self._opened = 0.0
        self._odd = 0

    def session(self) -> Session:
        """The part's session, opened at need."""
        if self._session is None or self._session.closed:
            self._session = self._connect()
            self._opened = time.monotonic()
        return self._session

    def attempt(self, step: Callable[[], None]) -> float:
        """Do one step; seconds to wait before the next one.

        Raises:
            SchemaError: The queue is gone, of another version, or not open to the role.
            ConfigError: A worker with these options cannot work here.
            Exception: Whatever was raised ten times in a row, by an error of ours.
        """
        try:
            step()
        except (SchemaError, ConfigError):
            self.disconnect()
            raise
        except (psycopg.Error, OSError) as error:
            self._outages.began(self.name, error, math.inf if self._session is None else self._opened)
            self.disconnect()
            wait = self._retry.wait()
            return max(wait, FOLLOWING) if self._outages.follows(self.name) else wait
        except Exception as error:
            self.disconnect()
            self._odd += 1
            logger.exception("the %s met an unexpected error (%s)", self.name, describe(error))
            if self._odd >= FOR_GOOD:
                raise
            return self._retry.wait()
        self._odd = 0
        self._retry.reset()
        self._outages.ended(self.name)
        return 0.0

    def disconnect(self) -> None:
        """Close the session; the next step opens a new one."""
        session, self._session = self._session, None
        if session is not None:
            session.close()


def spawn(name: str, target: Callable[[], None]) -> threading.Thread:
    """Start a daemon thread: it keeps no process alive that has ended without stopping its worker."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread
