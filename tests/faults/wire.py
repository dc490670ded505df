"""A proxy that knows which session it carries, and can keep the answers of one to itself."""

from __future__ import annotations

import contextlib
import re
import socket
import time

from fixtures.proxy import Link, Proxy

__all__ = ["Wire"]

_NAME = re.compile(rb"application_name\0([^\0]*)\0")


class Wire(Proxy):
    """A proxy that can also lose answers, be slow, and let peers go silent.

    A commit is ambiguous when the server has done it and the answer never came: `mute` the session, see by another one
    that it was done, and `snip`.
    """

    def __init__(self, dsn: str) -> None:
        self._names: dict[Link, str] = {}
        self._muted: set[Link] = set()
        self._stranded: set[Link] = set()
        self._armed: tuple[str, bytes] | None = None
        self._latency = 0.0
        super().__init__(dsn)

    def mute(self, name: str, since: bytes = b"") -> None:
        """Keep the server's answers to the sessions of that application name to ourselves.

        Args:
            since: Only from when one of them sends this. Default: at once.
        """
        with self._state:
            if since:
                self._armed = (name, since)
            else:
                self._muted |= {link for link in self._links if self._names.get(link) == name}

    def snip(self) -> None:
        """Cut the muted sessions; without one nothing was lost, and the test proves nothing."""
        __tracebackhide__ = True
        with self._state:
            muted = self._muted & self._links
            for link in muted:
                self._drop(link)
            self._muted.clear()
        assert muted, "no session is muted"

    def strand(self) -> None:
        """Let every session that there is now hear nothing any more, without being closed; new ones work."""
        with self._state:
            self._stranded |= self._links

    def delay(self, seconds: float) -> None:
        """Make everything that is sent, in either direction, so much later."""
        self._latency = seconds

    def _copy(self, source: socket.socket, sink: socket.socket, link: Link) -> None:
        with contextlib.suppress(OSError):
            while (data := source.recv(65536)) and self._begin(link):
                try:
                    time.sleep(self._latency)
                    if self._passes(data, link, up=source is link[0]):
                        sink.sendall(data)
                finally:
                    self._end()
        with self._state:
            self._drop(link)

    def _passes(self, data: bytes, link: Link, *, up: bool) -> bool:
        with self._state:
            if up and (name := _NAME.search(data)):
                self._names[link] = name[1].decode()
            if up and self._armed and self._armed[0] == self._names.get(link) and self._armed[1] in data:
                self._armed = None
                self._muted.add(link)
            return link not in self._stranded and (up or link not in self._muted)
