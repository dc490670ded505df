"""The thread that listens: it wakes the coordinator when a notification comes, and parks for it.

It owns the one session that listens and holds PARKED (see `venturi.store.doorbell`), so that a session that dies takes
both with it. Losing it costs latency only: the coordinator polls meanwhile. It looks into a notification only to tell
a request to cancel, work for which there is room, and other work apart, and it never sends a statement while there is
nothing to say but a ping.
"""

from __future__ import annotations

import enum
import select
import socket
import threading
from collections.abc import Callable, Sequence, Set
from contextlib import suppress

from venturi.store import doorbell, sql
from venturi.store.connections import Session
from venturi.store.sql import Sql
from venturi.worker.outages import Outages, Retry
from venturi.worker.threads import Part, spawn

__all__ = ["ANSWER_SECONDS", "Listener", "Parking"]

PING_SECONDS = 25.0
"""A peer that is silently gone is noticed after this and the time that one answer may take."""

ANSWER_SECONDS = 10.0
"""The longest wait for the answer to a statement of the listener's."""


class Parking(enum.Enum):
    """Whether the coordinator may sleep."""

    AWAY = "no session listens: poll"
    AWAKE = "not parked"
    EARLY = "parked, but a producer that looked before may still commit: poll, and ask again"
    SAFE = "parked: after one more claim every job that comes will be announced"


class Listener:
    """Listens for one worker.

    Args:
        connect: Opens its session.
        statements: The queue's.
        bells: What it parks for.
        kinds: Gives the kinds that the worker has room for now.
        wake: Called when there may be work, and when the parking has changed.
        cancel: Called when somebody has asked to cancel a claimed job.
        reconnected: Called when a session was opened after another one was lost.
        failed: Called when it cannot go on for good.
    """

    def __init__(
        self,
        connect: Callable[[], Session],
        statements: Sql,
        bells: Sequence[int],
        kinds: Callable[[], Set[str]],
        outages: Outages,
        *,
        wake: Callable[[], None],
        cancel: Callable[[], None],
        reconnected: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._parking = Parking.AWAY
        self._part = Part("listener", connect, outages, Retry(0.1, 30.0))
        self._sql = statements
        self._bells = bells
        self._kinds = kinds
        self._wake = wake
        self._cancel = cancel
        self._reconnected = reconnected
        self._failed = failed
        self._lost = False
        self._wanted = False
        self._ask = False
        self._stopping = False
        self._here, self._there = socket.socketpair()
        self._there.setblocking(False)
        self._here.setblocking(False)
        self._thread: threading.Thread | None = None

    @property
    def parking(self) -> Parking:
        """Whether the coordinator may sleep."""
        # What it has asked to end is over for it, however long this thread takes to do so.
        held = self._parking in (Parking.EARLY, Parking.SAFE)
        return Parking.AWAKE if held and not self._wanted else self._parking

    def start(self) -> None:
        """Begin to listen."""
        self._thread = spawn("venturi-listener", self._run)

    def park(self) -> None:
        """Ask for PARKED, or ask again after EARLY; the answer comes as a wake-up with ``parking`` changed."""
        self._wanted = self._ask = True
        self._poke()

    def leave(self) -> None:
        """Give PARKED up, some time soon; until then producers notify in vain."""
        if self._wanted:
            self._wanted = False
            self._poke()

    def stop(self, timeout: float) -> None:
        """End the thread and its session."""
        self._stopping = True
        self._poke()
        if self._thread is not None:
            self._thread.join(timeout)
        else:
            self._here.close()
        self._there.close()

    def retry(self) -> None:
        """Try to connect now: another part has reached the database."""
        if self._parking is Parking.AWAY:
            self._poke()

    def _poke(self) -> None:
        # An error means: full, so that it wakes up all the same; or closed, after stop.
        with suppress(OSError):
            self._there.send(b"!")

    def _run(self) -> None:
        try:
            while not self._stopping:
                wait = self._part.attempt(self._step)
                if wait:
                    self._change(Parking.AWAY)
                    self._lost = True
                    self._pause([self._here], wait)
        except BaseException as error:
            self._failed(error)
        finally:
            self._part.disconnect()
            self._change(Parking.AWAY)
            # By nobody else: this thread may outlive the worker, in a wait that no patience ends.
            self._here.close()

    def _step(self) -> None:
        session = self._part.session()
        if self._parking is Parking.AWAY:
            doorbell.listen(session, self._sql)
            # What was announced while nobody listened is looked for: jobs, and requests to cancel.
            self._change(Parking.AWAKE)
            self._cancel()
            if self._lost:
                self._lost = False
                self._reconnected()
            return
        self._settle_parking(session)
        # A notification that comes with the answer to a statement waits in memory, where no poll sees it.
        self._drain(session)
        readable = self._pause([session.fileno(), self._here], PING_SECONDS)
        if self._stopping:
            return
        if session.fileno() in readable:
            self._drain(session)
        elif not readable:
            session.execute(b"SELECT 1", prepare=False)

    def _settle_parking(self, session: Session) -> None:
        if self._wanted and self._ask:
            self._ask = False
            held = self._parking is not Parking.AWAKE
            safe = doorbell.quiet(session, self._sql) if held else doorbell.park(session, self._sql, self._bells)
            self._change(Parking.AWAKE if safe is None else Parking.SAFE if safe else Parking.EARLY)
            if safe is None:
                self._wake()  # whoever asked may wait for the answer, though nothing has changed
        elif not self._wanted and self._parking in (Parking.EARLY, Parking.SAFE):
            self._parking = Parking.AWAKE
            doorbell.leave(session, self._sql, self._bells)

    def _drain(self, session: Session) -> None:
        payloads = {notification.payload for notification in session.notifies(timeout=0)}
        if "cancel" in payloads:
            self._cancel()
        # Jobs of a kind that is at its cap are looked for when one of its runs ends.
        if payloads - {"cancel"} and not payloads.isdisjoint(self._meant()):
            self._wake()

    def _meant(self) -> set[str]:
        return {sql.ANY, *(str(self._sql.bell(kind)) for kind in self._kinds())}

    def _change(self, parking: Parking) -> None:
        if self._parking is not parking:
            self._parking = parking
            self._wake()

    def _pause(self, sources: list[socket.socket | int], timeout: float) -> set[int]:
        poll = select.poll()
        for source in sources:
            poll.register(source, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(timeout * 1000)}
        if self._here.fileno() in ready:
            self._here.recv(4096)
        return ready
