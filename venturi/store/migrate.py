"""Brings one queue's schema up to date: the SQL files of ``migrations/``, planned and applied by yoyo.

A schema is missing, or at version N when its table ``migrations`` records the files 1 to N, or damaged when the records
do not fit the files. What holds:

- A migration and its record commit together or not at all, so a schema is never between two versions.
- Whoever applies holds a session advisory lock of that schema, and plans again once it has it. The lock ends with the
  connection, so a process that dies holds up nobody. It needs a session: a transaction pooler gives none.
- A schema that is up to date is only read. What may be missing is looked up in the catalog instead of tried, so that no
  expected error reaches the server's log.
- A migration waits for a table's lock only briefly and then begins again, since every claim queues up behind it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import logging
import time
import typing as t
from collections.abc import Callable, Collection, Generator, Sequence
from importlib.resources.abc import Traversable

import attrs
import psycopg
from psycopg import errors
from psycopg.rows import dict_row, tuple_row

from venturi import checks
from venturi.errors import SchemaError
from venturi.log import log
from venturi.store.connections import migrate_command
from venturi.store.files import NAME, File, load, number_of, render

__all__ = ["VERSION", "Status", "check", "migrate", "script", "status"]

VERSION: t.Final = 2
"""The schema version that this library was made for: the number of its newest migration."""

WAIT = 60.0
"""Seconds to wait for another process that migrates the same schema."""

POLL = 0.05
"""Seconds between two looks at its lock."""

ATTEMPTS = 4
"""How often a migration is begun while other transactions hold locks on its tables."""

PAUSE = 1.0
"""Seconds between two attempts, in which whatever queued up behind the migration goes on."""

# A role's defaults may be others. Five seconds are what a claim may have to wait behind a migration.
_LIMITS = """\
SET LOCAL lock_timeout = '5s';
SET LOCAL statement_timeout = 0;
"""

_CREATE_SCHEMA = "CREATE SCHEMA IF NOT EXISTS {schema};\n"

_CREATE_RECORDS = """\
CREATE TABLE {schema}.migrations (
  name        text COLLATE "C" PRIMARY KEY,
  checksum    text NOT NULL,
  applied_at  timestamptz NOT NULL DEFAULT now()
);
COMMENT ON TABLE {schema}.migrations IS 'The migrations applied to this schema, each with the SHA-256 of its file.';
"""

_HAS_SCHEMA = "SELECT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = %s)"

_HAS_TABLE = """\
SELECT EXISTS (SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
                WHERE n.nspname = %s AND c.relname = %s)
"""

_logger = log(__name__)


@attrs.frozen
class Status:
    """Where a schema stands.

    Attributes:
        version: Number of the newest migration applied; None when there is none.
        newest: The newest version that this library knows.
        applied: Names of the migrations applied, oldest first.
        pending: Names of those that ``migrate`` would apply, oldest first.
    """

    version: int | None
    newest: int
    applied: tuple[str, ...]
    pending: tuple[str, ...]


def migrate(conninfo: str, schema: str, *, source: Traversable | None = None) -> list[str]:
    """Applies the migrations that a schema lacks; makes the schema itself when it is missing.

    Any number of processes may call it at once: one applies, the others wait for it. A schema that is up to date is
    only read, so that a role that may create nothing can call it as well.

    Args:
        conninfo: Keywords or URL, as libpq takes them; an empty string leaves all to the environment. It must lead to
            the server itself or to a session pooler.
        schema: Name of the queue's schema.
        source: Folder of the migrations. Default: those of this library.

    Returns:
        Names of the migrations applied, oldest first; empty when there were none to apply.

    Raises:
        ConfigError: No schema can have that name.
        SchemaError: The records in the schema do not fit the files, or it is too new for this library.
        psycopg.errors.LockNotAvailable: Another process went on migrating for 60 s, or other transactions kept a table
            locked through all attempts.
        psycopg.Error: The database refused something. Migrations that were applied before stay applied.
    """
    schema = checks.schema(schema)
    files = load(source)
    with _quiet_yoyo(), _backend(conninfo, schema, files) as backend:
        migrations = _migrations(files, schema)
        if not backend.to_apply(migrations):
            check(backend.connection, schema)
            return []
        with backend.lock():
            pending = backend.to_apply(migrations)
            backend.apply_migrations(pending)
            return [migration.id for migration in pending]


def status(conninfo: str, schema: str, *, source: Traversable | None = None) -> Status:
    """Where a schema stands, found out by reading alone.

    Args:
        conninfo: As for `migrate`.
        schema: Name of the queue's schema.
        source: Folder of the migrations. Default: those of this library.

    Raises:
        ConfigError: No schema can have that name.
        SchemaError: The records in the schema do not fit the files.
    """
    schema = checks.schema(schema)
    files = load(source)
    with _connect(conninfo) as connection:
        applied = _applied(connection, schema, files)
    return Status(
        version=number_of(applied[-1]) if applied else None,
        newest=files[-1].number,
        applied=tuple(applied),
        pending=tuple(file.name for file in files if file.name not in applied),
    )


def script(schema: str, applied: Collection[str] = (), *, source: Traversable | None = None) -> str:
    """The SQL that `migrate` would run, records included, with one transaction per migration.

    Args:
        schema: Name of the queue's schema.
        applied: Names of the migrations to leave out, like ``status(...).applied``. Default: none, for a new queue.
        source: Folder of the migrations. Default: those of this library.

    Returns:
        A script for psql; empty when no migration is left.

    Raises:
        ConfigError: No schema can have that name.
    """
    schema = checks.schema(schema)
    begin = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;\n" + _LIMITS
    first = _CREATE_SCHEMA + _CREATE_RECORDS
    return "\n".join(
        render(f"{begin}{first if file.number == 1 else ''}{file.text}{file.record}COMMIT;\n", schema)
        for file in load(source)
        if file.name not in applied
    )


def check(connection: psycopg.Connection[t.Any], schema: str) -> None:
    """Makes sure that this library can work on a schema, by reading alone.

    Args:
        connection: Any connection; a transaction that is open on it stays usable whatever the answer.
        schema: Name of the queue's schema.

    Raises:
        ConfigError: No schema can have that name.
        SchemaError: The schema is missing, older than this library, or too new for it.
    """
    schema = checks.schema(schema)
    version, oldest = _version(connection, schema) or (0, 0)
    if version < VERSION:
        state = f"at version {version}" if version else "missing"
        what = f"schema {schema!r} is {state}, this library needs version {VERSION}"
        raise SchemaError(f"{what}: run `{migrate_command(schema)}`")
    if oldest > VERSION:
        raise SchemaError(
            f"schema {schema!r} is at version {version} and serves libraries made for version {oldest} or later, this "
            f"one was made for {VERSION}: upgrade it to the one whose `venturi migrate` made the schema"
        )


def _version(connection: psycopg.Connection[t.Any], schema: str) -> tuple[int, int] | None:
    """The schema's version and the oldest library that it serves; None when it has no version."""
    if not _exists(connection, _HAS_TABLE, schema, "versions"):
        return None
    newest = render("SELECT version, oldest_library FROM {schema}.versions ORDER BY version DESC LIMIT 1", schema)
    with connection.cursor(row_factory=tuple_row) as cursor:
        return cursor.execute(newest.encode()).fetchone()


def _applied(connection: psycopg.Connection[t.Any], schema: str, files: Sequence[File]) -> list[str]:
    """Names of the migrations recorded in the schema, oldest first.

    Raises:
        SchemaError: The records are no unbroken sequence from 1, or do not fit the files as far as those go.
    """
    if not _exists(connection, _HAS_TABLE, schema, "migrations"):
        return []
    with connection.cursor(row_factory=dict_row) as cursor:
        # Every column, since naming one that is not there would be an error of the server.
        records = cursor.execute(render("SELECT * FROM {schema}.migrations", schema).encode()).fetchall()
    if not records:
        raise SchemaError(f"schema {schema!r}: the table of migrations is empty")
    records.sort(key=lambda record: str(record.get("name")))
    for number, record in enumerate(records, 1):
        _fit(schema, record, number, files)
    return [record["name"] for record in records]


def _fit(schema: str, record: dict[str, t.Any], number: int, files: Sequence[File]) -> None:
    """Compares one record with the file of its number; a newer library's record has none here."""
    name, checksum = record.get("name"), record.get("checksum")
    if not isinstance(name, str) or not NAME.fullmatch(name) or not isinstance(checksum, str):
        raise SchemaError(f"schema {schema!r}: malformed record of a migration, {record!r}")
    file = files[number - 1] if number <= len(files) else None
    if int(name[:4]) != number or (file and name != file.name):
        expected = file.name if file else f"number {number}"
        raise SchemaError(f"schema {schema!r} records the migration {name!r} in the place of {expected!r}")
    if file and checksum != file.checksum:
        raise SchemaError(f"schema {schema!r}: the file of the migration {name!r} has changed since it was applied")


def _backend(conninfo: str, schema: str, files: Sequence[File]) -> t.Any:
    """yoyo on one schema: it plans and runs the steps; how it connects, locks and records is replaced.

    Its own lock outlives a holder that died, its records commit apart from the migration, its tables lie wherever the
    search_path points, and it reads connection URLs in a way of its own.
    """
    # Imported here, since only those who migrate should pay for it.
    yoyo = importlib.import_module("yoyo.backends.core.postgresql")
    digest = importlib.import_module("yoyo.migrations").get_migration_hash
    records = {file.name: render(file.record, schema).encode() for file in files}

    class Backend(yoyo.PostgresqlPsycopgBackend):  # type: ignore[misc, name-defined]
        _internal_schema_updated = True

        def connect(self, dburi: str) -> psycopg.Connection:
            return _connect(dburi)

        @contextlib.contextmanager
        def lock(self, timeout: float = WAIT) -> Generator[None]:
            _lock(self.connection, schema, timeout)
            yield

        def transaction(self, rollback_on_exit: bool = False) -> contextlib.AbstractContextManager[psycopg.Transaction]:
            connection: psycopg.Connection = self.connection
            return connection.transaction(force_rollback=rollback_on_exit)

        def get_applied_migration_hashes(self) -> list[str]:
            return [digest(name) for name in _applied(self.connection, schema, files)]

        def apply_one(self, migration: t.Any, force: bool = False, mark: bool = True) -> None:
            _persist(lambda: self.apply_and_mark(migration), f"migration {migration.id} of schema {schema!r}")

        def apply_and_mark(self, migration: t.Any) -> None:
            with self.transaction():
                self.connection.execute(_LIMITS)
                migration.process_steps(self, "apply")
                self.mark_one(migration)

        def mark_one(self, migration: t.Any, log: bool = True) -> None:
            self.connection.execute(records[migration.id])

    return Backend(conninfo, "migrations")


def _migrations(files: Sequence[File], schema: str) -> t.Any:
    """The files as yoyo's own objects; by itself it reads only folders on disk, and files that name their schema."""
    yoyo = importlib.import_module("yoyo.migrations")
    migrations = yoyo.MigrationList()
    for file in files:
        migration = yoyo.Migration(file.name, f"{file.name}.sql", "venturi")
        steps = yoyo.StepCollector(migration)
        if file.number == 1:
            steps.add_step(functools.partial(_prepare, schema=schema))
        steps.add_step(functools.partial(_run, statements=render(file.text, schema)))
        migration.steps, migration._depends = steps.create_steps(migration.use_transactions), set()
        migrations.append(migration)
    return migrations


def _prepare(connection: psycopg.Connection, schema: str) -> None:
    """Makes the schema, unless somebody with more rights has done so, and its table of records."""
    encoding = connection.info.parameter_status("server_encoding")
    if encoding != "UTF8":
        raise SchemaError(f"the database has the encoding {encoding}, which cannot hold every payload: UTF8 is needed")
    if not _exists(connection, _HAS_SCHEMA, schema):
        _run(connection, render(_CREATE_SCHEMA, schema))
    _run(connection, render(_CREATE_RECORDS, schema))


def _run(connection: psycopg.Connection, statements: str) -> None:
    connection.execute(statements.encode())


def _persist(attempt: Callable[[], None], what: str) -> None:
    """Makes up to `ATTEMPTS` attempts at what other transactions may hold up."""
    for remaining in reversed(range(ATTEMPTS)):
        try:
            attempt()
        except (errors.LockNotAvailable, errors.DeadlockDetected) as error:
            if not remaining:
                raise
            _logger.warning("%s is held up by other transactions, attempts left: %d; %s", what, remaining, error)
            time.sleep(PAUSE)
        else:
            return


def _lock(connection: psycopg.Connection, schema: str, timeout: float) -> None:
    """Takes the lock of a schema's migrations, which is held until the connection ends.

    Raises:
        LockNotAvailable: Another session has held it all the time.
    """
    digest = hashlib.blake2b(schema.encode(), digest_size=8, person=b"venturi migrate").digest()
    key = int.from_bytes(digest, "big", signed=True)
    deadline = time.monotonic() + timeout
    if _taken(connection, key):
        return
    _logger.warning("waiting up to %g s for another process that migrates schema %r", timeout, schema)
    # Asked again and again, because a lock_timeout that strikes would be an error in the server's log.
    while not _taken(connection, key):
        if time.monotonic() > deadline:
            raise errors.LockNotAvailable(f"schema {schema!r}: another process has been migrating it for {timeout:g} s")
        time.sleep(POLL)


def _taken(connection: psycopg.Connection, key: int) -> bool:
    return connection.execute("SELECT pg_catalog.pg_try_advisory_lock(%s)", [key]).fetchone() == (True,)


def _connect(conninfo: str) -> psycopg.Connection:
    connection = psycopg.connect(conninfo, autocommit=True, client_encoding="utf8", prepare_threshold=None)
    connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    connection.read_only = False
    return connection


def _exists(connection: psycopg.Connection[t.Any], query: t.LiteralString, *names: str) -> bool:
    with connection.cursor(row_factory=tuple_row) as cursor:
        return cursor.execute(query, names).fetchone() == (True,)


@contextlib.contextmanager
def _quiet_yoyo() -> Generator[None]:
    """Keeps yoyo's reports of each step out of the application's log."""
    logger = logging.getLogger("yoyo.migrations")
    logger.addFilter(_reject)
    try:
        yield
    finally:
        logger.removeFilter(_reject)


def _reject(_: logging.LogRecord) -> bool:
    return False
