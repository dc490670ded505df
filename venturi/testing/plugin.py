"""A pytest plugin: a server, a migrated queue, and a connection whose transaction is rolled back.

Load it in ``conftest.py`` with ``pytest_plugins = ["venturi.testing.plugin"]``. The server is the first there is of
the URL in VENTURI_TEST_DATABASE_URL, a private one from the extra ``embedded``, and a private one of an installed
PostgreSQL.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import psycopg
import pytest

import venturi
from venturi import embedded
from venturi.store import migrate

__all__ = ["venturi_conn", "venturi_dsn"]


@pytest.fixture(scope="session")
def venturi_dsn() -> Generator[str]:
    """The connection string of the tests' server; the default queue's schema is migrated there."""
    given = os.environ.get("VENTURI_TEST_DATABASE_URL")
    if given:
        migrate.migrate(given, venturi.default.schema)
        yield given
        return
    with embedded.server() as server:
        migrate.migrate(server.dsn, venturi.default.schema)
        yield server.dsn


@pytest.fixture
def venturi_conn(venturi_dsn: str) -> Generator[psycopg.Connection]:
    """A connection for one test; what it does is rolled back afterwards."""
    with psycopg.connect(venturi_dsn) as connection:
        try:
            yield connection
        finally:
            connection.rollback()
