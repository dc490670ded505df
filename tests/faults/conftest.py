"""The fault tests have a server of their own, which they stop, crash and starve, and worker processes to kill."""

from __future__ import annotations

import collections.abc as cabc
import contextlib
import pathlib
import typing as t

import pytest
from faults.crew import Hand
from faults.wire import Wire

from venturi import embedded


@pytest.fixture(scope="session")
def victim() -> cabc.Iterator[embedded.Server]:
    """The server that the tests mistreat."""
    with embedded.server(settings={"max_connections": "100"}) as private:
        yield private


@pytest.fixture(scope="session")
def dsn(victim: embedded.Server) -> str:
    """The connection string of that server."""
    return victim.dsn


@pytest.fixture(autouse=True)
def started(victim: embedded.Server) -> cabc.Iterator[None]:
    """Whatever a test has done to the server, the next one finds it running."""
    yield
    victim.start()


@pytest.fixture
def wire(dsn: str) -> cabc.Iterator[Wire]:
    """A wire to the server that can be bugged."""
    wire = Wire(dsn)
    yield wire
    wire.close()


@pytest.fixture
def log(tmp_path: pathlib.Path) -> pathlib.Path:
    """The log of effects of all worker processes."""
    return tmp_path / "effects"


@pytest.fixture
def hire(dsn: str, schema: str, tmp_path: pathlib.Path) -> cabc.Iterator[cabc.Callable[..., Hand]]:
    """Starts worker processes; those that still run after the test are killed."""
    with contextlib.ExitStack() as hired:

        def hire(dsn: str = dsn, **options: t.Any) -> Hand:
            hand = Hand(dsn, schema, tmp_path, **options)
            hired.callback(hand.close)
            return hand

        yield hire
