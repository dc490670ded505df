"""Migrations: what they make, what may happen to them on the way, and what is said of a schema that does not fit."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import multiprocessing
import shutil
import signal
import subprocess
import sys
import typing as t
import urllib.parse
import uuid
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import psycopg
import pytest
from fixtures.waiting import eventually
from psycopg import errors, sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import venturi
from venturi import checks
from venturi.errors import ConfigError, SchemaError
from venturi.store import migrate
from venturi.store.connections import migrate_command

ROOT = Path(__file__).parent.parent
PACKAGE = Path(venturi.__file__).parent
FILES = sorted((ROOT / "migrations").glob("*.sql"))
NAMES = [path.stem for path in FILES]

SPAWN = multiprocessing.get_context("spawn")

GATE = 7_165_101
"""The advisory key at which a migration of a test waits for the test."""

HOSTILE = (
    "venturi",
    "jobs_v2",
    "a",
    "Venturi",
    "jobs-v2",
    "a b",
    "select",
    'Robert"; drop',
    "a'; DROP TABLE x; --",
    "a%s",
    "{x}",
    "{schema}",
    "a:name",
    "$$",
    "a\n'b\\",
    "schlüssel-鍵-🔑",
    "x" * 63,
)

CATALOG = """
SELECT c.relkind::text, c.relname::text, c.reloptions::text, obj_description(c.oid, 'pg_class'), pg_get_viewdef(c.oid),
       pg_get_indexdef(c.oid), NULL, NULL
  FROM pg_class c WHERE c.relnamespace = %(schema)s::regnamespace AND c.relkind <> 't'
UNION ALL
SELECT 'a', c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull::text, a.attidentity::text,
       pg_get_expr(d.adbin, d.adrelid), col_description(c.oid, a.attnum)
  FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
       LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
 WHERE c.relnamespace = %(schema)s::regnamespace AND c.relkind IN ('r', 'v') AND a.attnum > 0
UNION ALL
SELECT 'c', c.conname, c.conrelid::regclass::text, pg_get_constraintdef(c.oid), NULL, NULL, NULL, NULL
  FROM pg_constraint c WHERE c.connamespace = %(schema)s::regnamespace
 ORDER BY 1, 2, 3
"""


@pytest.fixture
def connection(connect: Callable[..., psycopg.Connection]) -> psycopg.Connection:
    return connect(autocommit=True)


@pytest.fixture
def named(connection: psycopg.Connection) -> Iterator[Callable[[str], str]]:
    """Passes on the names of schemas, which are dropped after the test."""
    names: list[str] = []

    def named(name: str) -> str:
        names.append(name)
        return name

    yield named
    # What a failed test left open must not keep the others waiting.
    connection.execute("SET lock_timeout = '5s'")
    for name in names:
        execute(connection, name, "DROP SCHEMA IF EXISTS {schema} CASCADE")


@pytest.fixture
def fresh(named: Callable[[str], str]) -> str:
    """The name of a schema that does not exist yet."""
    return named(f"migrate {uuid.uuid4().hex}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the library's migrations."""
    return Path(shutil.copytree(ROOT / "migrations", tmp_path / "migrations"))


@pytest.fixture
def role(connection: psycopg.Connection) -> Iterator[str]:
    """A role that may do nothing."""
    role = f"migrate_{uuid.uuid4().hex}"
    connection.execute(sql.SQL("CREATE ROLE {}").format(sql.Identifier(role)))
    yield role
    connection.execute(sql.SQL("DROP OWNED BY {0} CASCADE; DROP ROLE {0}").format(sql.Identifier(role)))


def following(folder: Path, statements: str) -> str:
    """Adds a migration to a folder; gives its name."""
    name = f"{len(NAMES) + 1:04}.following"
    (folder / f"{name}.sql").write_text(statements)
    return name


def execute(connection: psycopg.Connection, schema: str, statements: t.LiteralString) -> psycopg.Cursor:
    return connection.execute(sql.SQL(statements).format(schema=sql.Identifier(schema)))


def script(schema: str, *arguments: t.Any, **options: t.Any) -> bytes:
    return migrate.script(schema, *arguments, **options).encode()


def catalog(connection: psycopg.Connection, schema: str) -> list[str]:
    """Everything that a schema holds, with its own name left out if it is one that needs quotes."""
    quoted = sql.Identifier(schema).as_string()
    found = [str(row) for row in connection.execute(CATALOG, {"schema": quoted})]
    found += [str(row) for row in execute(connection, schema, "SELECT name, checksum FROM {schema}.migrations")]
    found += [str(row) for row in execute(connection, schema, "SELECT version, oldest_library FROM {schema}.versions")]
    return [row.replace(quoted, "*") for row in found]


def elsewhere(connection: psycopg.Connection, schema: str) -> list[t.Any]:
    """Every relation, function and schema outside a schema."""
    query = """
        SELECT 'pg_class', oid FROM pg_class WHERE relnamespace <> %(schema)s::regnamespace AND relnamespace NOT IN
            (SELECT oid FROM pg_namespace WHERE nspname ~ '^pg_toast|^pg_temp')
        UNION ALL SELECT 'pg_proc', oid FROM pg_proc WHERE pronamespace <> %(schema)s::regnamespace
        UNION ALL SELECT 'pg_namespace', oid FROM pg_namespace WHERE oid <> %(schema)s::regnamespace ORDER BY 1, 2"""
    return connection.execute(query, {"schema": sql.Identifier(schema).as_string()}).fetchall()


def used(connection: psycopg.Connection, database: str) -> bool:
    """Whether a database has sessions."""
    return bool(connection.execute("SELECT FROM pg_stat_activity WHERE datname = %s", [database]).fetchall())


def waiting(connection: psycopg.Connection, database: str | None = None) -> list[str]:
    """What the other sessions of a database ran last, of those that wait for a lock or ask for one again and again."""
    query = """
        SELECT query FROM pg_stat_activity WHERE datname = coalesce(%s, current_database()) AND pid <> pg_backend_pid()
           AND (wait_event = 'advisory' OR query ~ 'pg_try_advisory_lock')"""
    return [row[0] for row in connection.execute(query, [database])]


@contextlib.contextmanager
def killed_at_the_gate(dsn: str, schema: str, folder: Path) -> Generator[str]:
    """Kills a process that migrates when it reaches the gate; gives its statement, which goes on afterwards."""
    process = SPAWN.Process(target=migrate.migrate, args=(dsn, schema), kwargs={"source": folder})
    with psycopg.connect(dsn, autocommit=True) as gate:
        gate.execute("SELECT pg_advisory_lock(%s)", [GATE])
        process.start()
        eventually(
            lambda: any("pg_try" not in query for query in waiting(gate)), 20, what="the migration is at the gate"
        )
        process.kill()
        process.join(10)
        assert process.exitcode == -signal.SIGKILL
        yield waiting(gate)[0]


@contextlib.contextmanager
def migrating(dsn: str, schema: str) -> Generator[None]:
    """Holds the lock of a schema's migrations, as a process in the middle of them does."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        migrate._lock(connection, schema, 0)  # pyright: ignore[reportPrivateUsage]
        yield


@pytest.mark.conformance(230)
def test_migrate_makes_everything_inside_the_schema(dsn: str, connection: psycopg.Connection, fresh: str) -> None:
    """On an empty database one call makes tables, views and records, and nothing outside the schema."""
    execute(connection, fresh, "CREATE SCHEMA {schema}")
    before = elsewhere(connection, fresh)
    execute(connection, fresh, "DROP SCHEMA {schema}")
    assert migrate.status(dsn, fresh) == migrate.Status(None, len(NAMES), (), tuple(NAMES))
    assert migrate.migrate(dsn, fresh) == NAMES
    assert migrate.status(dsn, fresh) == migrate.Status(len(NAMES), len(NAMES), tuple(NAMES), ())
    held = " ".join(catalog(connection, fresh))
    assert all(f"'{name}'" in held for name in ("jobs", "live", "journal", "all_jobs", "migrations", "versions"))
    assert [oid for oid in elsewhere(connection, fresh) if oid not in before] == []


@pytest.mark.conformance(230)
def test_a_second_call_changes_nothing(dsn: str, connection: psycopg.Connection, fresh: str) -> None:
    """A schema that is up to date is only read: the call takes no transaction id (case 150)."""
    migrate.migrate(dsn, fresh)
    before = catalog(connection, fresh)
    read_only = make_conninfo(dsn, options="-c default_transaction_read_only=on")
    with migrating(dsn, fresh):
        assert migrate.migrate(read_only, fresh) == []
    assert catalog(connection, fresh) == before


def test_the_version_is_the_number_of_the_newest_migration(
    dsn: str, connection: psycopg.Connection, fresh: str
) -> None:
    """The constant, the numbers of the files and the rows that they insert agree."""
    migrate.migrate(dsn, fresh)
    numbers = list(range(1, migrate.VERSION + 1))
    assert [int(name[:4]) for name in NAMES] == numbers
    assert execute(connection, fresh, "SELECT version FROM {schema}.versions ORDER BY 1").fetchall() == [
        (n,) for n in numbers
    ]


def test_a_url_reaches_the_same_database(dsn: str, fresh: str) -> None:
    """Connection strings are libpq's: keywords, and URLs that begin with postgresql or postgres."""
    query = urllib.parse.urlencode(conninfo_to_dict(dsn), quote_via=urllib.parse.quote)
    assert migrate.migrate(f"postgresql:///?{query}", fresh) == NAMES
    assert migrate.migrate(f"postgres:///?{query}", fresh) == []
    assert migrate.migrate(dsn, fresh) == []


@pytest.mark.conformance(226)
@pytest.mark.parametrize("name", HOSTILE)
def test_any_name_of_a_schema_works(
    dsn: str, connection: psycopg.Connection, named: Callable[[str], str], name: str
) -> None:
    """Names are quoted wherever they appear, in what is run and in what is printed (case 149)."""
    schema = named(name)
    assert migrate.migrate(dsn, schema) == NAMES
    migrate.check(connection, schema)
    migrated = catalog(connection, schema)
    execute(connection, schema, "DROP SCHEMA {schema} CASCADE")
    connection.execute(script(schema))
    assert migrate.migrate(dsn, schema) == []
    assert catalog(connection, schema) == migrated


@pytest.mark.conformance(226)
@pytest.mark.parametrize("name", ["", "x" * 64, "é" * 32, "a\0b", "pg_x", "information_schema", "\ud800", None, b"a"])
def test_an_impossible_name_of_a_schema_is_refused(name: t.Any) -> None:
    """A name is checked before anything is connected to, and named in the message."""
    with pytest.raises(ConfigError, match=r"^schema="):
        checks.schema(name)
    with pytest.raises(ConfigError, match=r"^schema="):
        migrate.script(name)
    for verb in (migrate.migrate, migrate.status):
        with pytest.raises(ConfigError, match=r"^schema="):
            verb("host=/nowhere", name)


@pytest.mark.conformance(227)
def test_two_schemas_of_one_database_are_independent(
    dsn: str, connection: psycopg.Connection, named: Callable[[str], str]
) -> None:
    """Each has its own records; dropping one leaves the other as it is (case 141)."""
    first, second = named(f"first {uuid.uuid4().hex}"), named(f"second {uuid.uuid4().hex}")
    migrate.migrate(dsn, first)
    assert migrate.status(dsn, second).version is None
    with migrating(dsn, first):
        assert migrate.migrate(dsn, second) == NAMES
    assert catalog(connection, first) == catalog(connection, second)
    execute(connection, first, "DROP SCHEMA {schema} CASCADE")
    assert migrate.migrate(dsn, second) == []
    migrate.check(connection, second)


@pytest.mark.conformance(231)
def test_eight_processes_apply_each_migration_once(
    dsn: str, connection: psycopg.Connection, fresh: str, folder: Path
) -> None:
    """All of them succeed, and what one applied no other applies again (case 141)."""
    names = [*NAMES, following(folder, "CREATE TABLE {schema}.more (id int PRIMARY KEY);")]
    with concurrent.futures.ProcessPoolExecutor(8, mp_context=SPAWN) as pool, contextlib.ExitStack() as stack:
        stack.enter_context(migrating(dsn, fresh))
        calls = [pool.submit(migrate.migrate, dsn, fresh, source=folder) for _ in range(8)]
        eventually(lambda: len(waiting(connection)) == 9, 30, what="the eight wait for the ninth")
        stack.close()
        results = [call.result(30) for call in calls]
    assert sorted(results) == [[]] * 7 + [names]


@pytest.mark.conformance(231, 232)
def test_a_process_killed_in_a_migration_leaves_neither_its_lock_nor_half_a_schema(
    dsn: str, fresh: str, folder: Path
) -> None:
    """The lock ends with its holder, and what it had begun is undone; the next call makes the schema.

    Cases 141, 143.
    """
    first = folder / FILES[0].name
    text = first.read_text()
    first.write_text(f"{text}SELECT pg_advisory_xact_lock({GATE});\n")
    with killed_at_the_gate(dsn, fresh, folder):
        assert migrate.status(dsn, fresh).version is None
    assert migrate.migrate(dsn, fresh) == NAMES


@pytest.mark.conformance(232)
def test_a_process_killed_between_a_migration_and_its_record_leaves_neither(
    dsn: str, connection: psycopg.Connection, fresh: str, folder: Path
) -> None:
    """The two are one transaction: the version before it stays, and the next call applies it again (case 143)."""
    migrate.migrate(dsn, fresh)
    name = following(
        folder,
        f"""
        CREATE FUNCTION {{schema}}.wait() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN PERFORM pg_advisory_xact_lock({GATE}); RETURN new; END $$;
        CREATE TRIGGER wait BEFORE INSERT ON {{schema}}.migrations FOR EACH ROW EXECUTE FUNCTION {{schema}}.wait();
        """,
    )
    with killed_at_the_gate(dsn, fresh, folder) as statement:
        assert statement.startswith("INSERT INTO")
    assert migrate.migrate(dsn, fresh, source=folder) == [name]
    assert migrate.status(dsn, fresh, source=folder).applied == (*NAMES, name)


@pytest.mark.conformance(232)
def test_a_migration_that_fails_leaves_the_version_before_it(
    dsn: str, connection: psycopg.Connection, fresh: str, folder: Path
) -> None:
    """The database's own error reaches the caller; nothing of the migration stays, and the schema is usable.

    Case 143.
    """
    name = following(folder, "CREATE TABLE {schema}.half (id int PRIMARY KEY);\nSELECT 1 / 0;\n")
    with pytest.raises(errors.DivisionByZero):
        migrate.migrate(dsn, fresh, source=folder)
    assert migrate.status(dsn, fresh, source=folder).pending == (name,)
    migrate.check(connection, fresh)
    assert "half" not in " ".join(catalog(connection, fresh))
    following(folder, "CREATE TABLE {schema}.half (id int PRIMARY KEY);")
    assert migrate.migrate(dsn, fresh, source=folder) == [name]


@pytest.mark.conformance(233)
def test_an_applied_migration_whose_file_has_changed_is_named(dsn: str, fresh: str, folder: Path) -> None:
    """A schema made from other files is refused by every verb, whereas other line ends are no change."""
    migrate.migrate(dsn, fresh)
    first = folder / FILES[0].name
    first.write_bytes(first.read_bytes().replace(b"\n", b"\r\n"))
    assert migrate.migrate(dsn, fresh, source=folder) == []
    first.write_text(first.read_text() + "SELECT 1;\n")
    for verb in (migrate.migrate, migrate.status):
        with pytest.raises(SchemaError, match=f"'{NAMES[0]}' has changed"):
            verb(dsn, fresh, source=folder)


@pytest.mark.conformance(233)
@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ("UPDATE {schema}.migrations SET name = 'garbage' WHERE name ~ '^0002'", "'garbage'"),
        ("UPDATE {schema}.migrations SET name = '0001.other' WHERE name ~ '^0001'", "'0001.other'"),
        ("UPDATE {schema}.migrations SET checksum = 'x' WHERE name ~ '^0001'", f"'{NAMES[0]}'"),
        ("INSERT INTO {schema}.migrations (name, checksum) VALUES ('0001.twice', 'x')", "'0001.twice'"),
        ("INSERT INTO {schema}.migrations (name, checksum) VALUES ('9999.far', 'x')", "'9999.far'"),
        ("ALTER TABLE {schema}.migrations ALTER checksum TYPE int USING 0", "'checksum': 0"),
        ("ALTER TABLE {schema}.migrations DROP checksum", "0001"),
        ("TRUNCATE {schema}.migrations", "empty"),
    ],
)
def test_a_malformed_record_is_named(
    dsn: str, connection: psycopg.Connection, fresh: str, damage: t.LiteralString, told: str
) -> None:
    """Records that nothing of this library wrote are refused before anything is changed."""
    migrate.migrate(dsn, fresh)
    execute(connection, fresh, damage)
    for verb in (migrate.migrate, migrate.status):
        with pytest.raises(SchemaError, match=told) as raised:
            verb(dsn, fresh)
        assert fresh in str(raised.value)


def test_a_database_that_cannot_hold_every_text_is_refused(
    dsn: str, connection: psycopg.Connection, fresh: str
) -> None:
    """An enqueue in it would fail by what the payload holds, inside the caller's transaction (case 001)."""
    name = sql.Identifier(fresh)
    connection.execute(sql.SQL("CREATE DATABASE {} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0").format(name))
    try:
        with pytest.raises(SchemaError, match=r"LATIN1.*UTF8"):
            migrate.migrate(make_conninfo(dsn, dbname=fresh), fresh)
    finally:
        connection.execute(sql.SQL("DROP DATABASE {}").format(name))


@pytest.mark.conformance(234)
def test_a_schema_that_is_missing_or_older_is_refused(dsn: str, connection: psycopg.Connection, fresh: str) -> None:
    """The error names both versions and the command, and the caller's transaction stays usable."""
    with connection.transaction():
        with pytest.raises(
            SchemaError, match=f"missing.*version {migrate.VERSION}.*`venturi migrate --schema '{fresh}'`"
        ):
            migrate.check(connection, fresh)
        connection.execute("SELECT 1")
    migrate.migrate(dsn, fresh)
    execute(connection, fresh, "DELETE FROM {schema}.versions")
    with pytest.raises(SchemaError, match=f"`venturi migrate --schema '{fresh}'`"):
        migrate.check(connection, fresh)


@pytest.mark.conformance(234)
def test_an_older_schema_is_refused(
    dsn: str, connection: psycopg.Connection, fresh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that is newer than the schema names both versions and the command (case 154)."""
    migrate.migrate(dsn, fresh)
    monkeypatch.setattr(migrate, "VERSION", migrate.VERSION + 1)
    versions = f"at version {len(NAMES)},.* version {len(NAMES) + 1}"
    with pytest.raises(SchemaError, match=f"{versions}: run `venturi migrate --schema '{fresh}'`"):
        migrate.check(connection, fresh)


def test_the_command_of_a_hint_is_ready_for_a_shell() -> None:
    """It names the schema, in quotes at need, unless it is the one that the command takes by itself."""
    assert migrate_command("venturi") == "venturi migrate"
    assert migrate_command("my 'queue'") == """venturi migrate --schema 'my '"'"'queue'"'"''"""


@pytest.mark.conformance(234)
def test_a_newer_schema_is_accepted_while_it_serves_this_library(
    dsn: str, connection: psycopg.Connection, fresh: str, folder: Path
) -> None:
    """Within the range of the newest version it works; beyond it both versions and the command are named (case 159)."""
    own = migrate.VERSION
    name = following(folder, f"INSERT INTO {{schema}}.versions VALUES ({own + 1}, {own});")
    migrate.migrate(dsn, fresh, source=folder)
    migrate.check(connection, fresh)
    assert migrate.migrate(dsn, fresh) == []
    assert migrate.status(dsn, fresh) == migrate.Status(own + 1, own, (*NAMES, name), ())
    execute(connection, fresh, "UPDATE {schema}.versions SET oldest_library = version")
    beyond = rf"version {own + 1} and serves .*version {own + 1} or later.* for {own}: .*`venturi migrate`"
    with pytest.raises(SchemaError, match=beyond):
        migrate.check(connection, fresh)
    with pytest.raises(SchemaError, match=beyond):
        migrate.migrate(dsn, fresh)


@pytest.mark.conformance(235)
def test_the_script_makes_the_same_schema(
    dsn: str, connection: psycopg.Connection, fresh: str, named: Callable[[str], str], folder: Path
) -> None:
    """What is printed and run by hand equals what migrate does, records included, from any version on."""
    name = following(folder, "ALTER TABLE {schema}.jobs ADD more int;\n-- no {schema} here")
    by_hand = named(f"script {uuid.uuid4().hex}")
    connection.execute(script(by_hand, source=ROOT / "migrations"))
    assert migrate.status(dsn, by_hand, source=folder).pending == (name,)
    rest = migrate.script(by_hand, NAMES, source=folder)
    assert (rest.count("BEGIN "), rest.count("COMMIT;")) == (1, 1)
    connection.execute(rest.encode())
    assert migrate.migrate(dsn, by_hand, source=folder) == []
    migrate.migrate(dsn, fresh, source=folder)
    assert catalog(connection, by_hand) == catalog(connection, fresh)
    assert migrate.script(by_hand, [*NAMES, name], source=folder) == ""


@pytest.mark.conformance(236)
def test_nothing_is_found_out_by_an_error(dsn: str, connection: psycopg.Connection) -> None:
    """Neither a first call nor a check, a status or a wait makes a statement fail, so the server's log stays clean."""
    database = f"migrate_{uuid.uuid4().hex}"
    target = make_conninfo(dsn, dbname=database)
    connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(database)))
    try:
        with psycopg.connect(target, autocommit=True) as other:
            with pytest.raises(SchemaError):
                migrate.check(other, "first")
            migrate.migrate(target, "first")
            migrate.migrate(target, "first")
            migrate.check(other, "first")
            migrate.status(target, "second")
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            with migrating(target, "second"):
                call = pool.submit(migrate.migrate, target, "second")
                eventually(lambda: len(waiting(connection, database)) == 2)
            assert call.result(20) == NAMES
        with psycopg.connect(target, autocommit=True) as other, pytest.raises(errors.DivisionByZero):
            other.execute("SELECT 1 / 0")
        eventually(lambda: not used(connection, database))
        rolled_back = "SELECT xact_rollback FROM pg_stat_database WHERE datname = %s"
        assert connection.execute(rolled_back, [database]).fetchone() == (1,), (
            "more failed than the test's own statement"
        )
    finally:
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(database)))


@pytest.mark.conformance(236)
def test_yoyo_is_not_heard(
    dsn: str, fresh: str, folder: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """A migration that answers with rows prints nothing, and no record of another library's logger appears."""
    caplog.set_level(logging.DEBUG)
    following(folder, "SELECT 1;")
    migrate.migrate(dsn, fresh, source=folder)
    assert [record.name for record in caplog.records if record.name.startswith("yoyo")] == []
    assert capsys.readouterr() == ("", "")


@pytest.mark.conformance(231)
def test_waiting_for_another_process_is_bounded_and_logged(
    dsn: str, fresh: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that does not come to its end holds up the others for a while only; they say for whom they wait.

    Case 141.
    """
    monkeypatch.setattr(migrate, "WAIT", 0.1)
    with migrating(dsn, fresh), pytest.raises(errors.LockNotAvailable, match=fresh):
        migrate.migrate(dsn, fresh)
    assert [record.levelname for record in caplog.records if fresh in record.getMessage()] == ["WARNING"]
    assert migrate.migrate(dsn, fresh) == NAMES


def test_a_migration_does_not_queue_up_behind_a_long_transaction(
    dsn: str, fresh: str, folder: Path, connect: Callable[..., psycopg.Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lets go of its place in the table's queue and begins again, a few times; then the error is the database's.

    Case 144.
    """
    migrate.migrate(dsn, fresh)
    name = following(folder, "ALTER TABLE {schema}.live ADD more int;")
    reader = connect()
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == migrate.ATTEMPTS:
            reader.rollback()

    monkeypatch.setattr("time.sleep", pause)
    monkeypatch.setattr(migrate, "_LIMITS", "SET LOCAL lock_timeout = '20ms';")
    execute(reader, fresh, "SELECT FROM {schema}.live")
    with pytest.raises(errors.LockNotAvailable):
        migrate.migrate(dsn, fresh, source=folder)
    assert migrate.migrate(dsn, fresh, source=folder) == [name]
    assert pauses == [migrate.PAUSE] * migrate.ATTEMPTS


def test_a_role_that_may_create_nothing_finds_a_schema_up_to_date(
    dsn: str, connection: psycopg.Connection, fresh: str, role: str
) -> None:
    """Workers may call migrate with the rights that their work needs (case 150)."""
    migrate.migrate(dsn, fresh)
    for grant in ("USAGE ON SCHEMA {schema}", "SELECT ON ALL TABLES IN SCHEMA {schema}"):
        connection.execute(
            sql.SQL("GRANT " + grant + " TO {role}").format(schema=sql.Identifier(fresh), role=sql.Identifier(role))
        )
    limited = make_conninfo(dsn, options=f"-c role={role}")
    assert migrate.migrate(limited, fresh) == []
    with pytest.raises(errors.InsufficientPrivilege):
        migrate.migrate(limited, f"{fresh} other")


def test_the_owner_of_an_empty_schema_needs_no_right_on_the_database(
    dsn: str, connection: psycopg.Connection, fresh: str, role: str
) -> None:
    """A schema that an administrator made is filled without being made again (case 152)."""
    connection.execute(sql.SQL("CREATE SCHEMA {} AUTHORIZATION {}").format(sql.Identifier(fresh), sql.Identifier(role)))
    assert migrate.migrate(make_conninfo(dsn, options=f"-c role={role}"), fresh) == NAMES


def test_defaults_of_the_role_do_not_matter(dsn: str, fresh: str, folder: Path) -> None:
    """Migrations set the limits and the isolation that they rely on themselves (case 124)."""
    name = following(folder, "SELECT pg_sleep(0.3);")
    settings = {"statement_timeout": "250ms", "default_transaction_read_only": "on", "search_path": "nowhere"}
    options = " ".join(f"-c {setting}={value}" for setting, value in settings.items())
    assert migrate.migrate(make_conninfo(dsn, options=options), fresh, source=folder) == [*NAMES, name]


def test_other_files_are_no_migrations(folder: Path) -> None:
    """Only files named like 0001.queue.sql count; a folder without any is an incomplete installation."""
    for name in ("README.md", "0002.draft.sql~", "2.short.sql", "0002.queue.rollback.sql", "0002.sql"):
        (folder / name).write_text("nonsense")
    assert migrate.script("q", source=folder) == migrate.script("q")
    for path in folder.iterdir():
        path.unlink()
    with pytest.raises(SchemaError, match="incomplete"):
        migrate.script("q", source=folder)


@pytest.mark.conformance(236)
@pytest.mark.parametrize("form", ["zip", "folder", "checkout"])
def test_the_migrations_are_found_wherever_the_package_lies(dsn: str, fresh: str, tmp_path: Path, form: str) -> None:
    """In a wheel's folder, in a zip on sys.path, and beside the package of a checkout, with no other one at hand."""
    shutil.copytree(PACKAGE, tmp_path / "lib" / "venturi", ignore=shutil.ignore_patterns("__pycache__", "migrations"))
    shutil.copytree(ROOT / "migrations", tmp_path / "lib" / ("" if form == "checkout" else "venturi") / "migrations")
    path = tmp_path / "lib"
    if form == "zip":
        path = Path(shutil.make_archive(str(tmp_path / "lib"), "zip", path))
    program = f"""if True:
        import sys
        sys.path.insert(0, {str(path)!r})
        import venturi
        from venturi.store import migrate
        assert venturi.__file__.startswith({str(path)!r}), venturi.__file__
        print(*migrate.migrate({dsn!r}, {fresh!r}))"""
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False
    )
    assert (result.stdout.split(), result.stderr) == (NAMES, "")
