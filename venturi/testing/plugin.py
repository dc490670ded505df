"""A pytest plugin: a server, a migrated queue, and a connection whose transaction is rolled back.

Load it in ``conftest.py`` with ``pytest_plugins = ["venturi.testing.plugin"]``. The server is the first there is of
the URL in VENTURI_TEST_DATABASE_URL, a private one from the extra ``embedded``, and a private one of an installed
PostgreSQL. A project with a test database of its own overrides `venturi_dsn` with a fixture of session scope.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import psycopg
import pytest

import venturi
from venturi import embedded
from venturi.testing.lending import using

__all__ = ["venturi_conn", "venturi_dsn", "venturi_queue"]


@pytest.fixture(scope="session")
def venturi_dsn() -> Generator[str]:
    """The connection string of the tests' server."""
    given = os.environ.get("VENTURI_TEST_DATABASE_URL")
    if given:
        yield given
        return
    with embedded.server() as server:
        yield server.dsn


@pytest.fixture(scope="session")
def venturi_queue(venturi_dsn: str) -> Generator[venturi.Queue]:
    """The default queue, migrated on the tests' server, where all queues without a ``dsn`` of their own lead now."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VENTURI_DATABASE_URL", venturi_dsn)
        # What it had opened before leads elsewhere.
        venturi.default.close()
        venturi.default.migrate()
        yield venturi.default
        venturi.default.close()


@pytest.fixture
def venturi_conn(venturi_dsn: str, venturi_queue: venturi.Queue) -> Generator[psycopg.Connection]:
    """A connection for one test, which the default queue's verbs use without ``conn=`` too; all is rolled back."""
    with psycopg.connect(venturi_dsn) as connection, using(connection, queue=venturi_queue):
        yield connection
        if not connection.closed:
            connection.rollback()
