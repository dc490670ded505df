"""Connections: where they lead, what each session pins down, and a deadline for every wait."""

from __future__ import annotations

import os
import shlex
import typing as t
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress

import psycopg
from psycopg import adapt, conninfo, errors
from psycopg.abc import PQGen, PQGenConn
from psycopg.rows import TupleRow, tuple_row

from venturi.errors import ConfigError, SchemaError
from venturi.store.adapting import adapters

__all__ = [
    "CALL_SECONDS",
    "Connection",
    "Rows",
    "Session",
    "array",
    "connect",
    "migrate_command",
    "own",
    "parameters",
    "prepare_session",
    "readable",
    "resolve",
    "run",
    "schema_errors",
    "texts",
    "together",
]

Connection: t.TypeAlias = psycopg.Connection[t.Any]
"""Any psycopg connection: whatever its row factory, cursor class and adapters are, they are left alone."""

CALL_SECONDS = 30.0
CONNECT_SECONDS = 10

RV = t.TypeVar("RV")
Y = t.TypeVar("Y")

# What the statements rely on, whatever the role's or the database's defaults are. enable_seqscan and jit: see
# venturi.store.sql.
_PINNED = {
    "enable_seqscan": "off",
    "jit": "off",
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    "timezone": "UTC",
    "datestyle": "ISO",
    "intervalstyle": "postgres",
    "statement_timeout": "30s",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "60s",
    "idle_session_timeout": "0",
}
_PINNED_SINCE_17 = {"transaction_timeout": "0"}


def resolve(dsn: str | None) -> str:
    """The connection string: the argument, else VENTURI_DATABASE_URL, else DATABASE_URL, else libpq's PG* variables.

    Raises:
        ConfigError: The one that is set cannot be parsed.
    """
    if dsn is not None:
        return readable("dsn", dsn)
    for name in ("VENTURI_DATABASE_URL", "DATABASE_URL"):
        if value := os.environ.get(name):
            return readable(name, value)
    return ""


def readable(option: str, value: object) -> str:
    """The value of an option that is a connection string; its text is never repeated, since it may hold a password.

    Raises:
        ConfigError: It cannot be parsed, or not as it is meant.
    """
    if not isinstance(value, str):
        raise ConfigError(f"{option} must be a connection string, not {type(value).__name__}")
    try:
        conninfo.conninfo_to_dict(value)
    except psycopg.ProgrammingError:
        raise ConfigError(f"{option} is no connection string that libpq understands") from None
    # A password ends for libpq at the first @. What follows would be a host, which errors and logs name.
    if value.startswith(("postgresql://", "postgres://")) and value.partition("?")[0].count("@") > 1:
        raise ConfigError(f"{option} has more than one @: within a name or a password it is written %40")
    return value


class Session(psycopg.Connection[TupleRow]):
    """A connection of our own. Every wait for the server ends, if need be with an OperationalError."""

    @staticmethod
    def patience() -> float:
        """The longest wait, in seconds, from now. When it falls to zero, waits that have begun end too."""
        return CALL_SECONDS

    @classmethod
    def _connect_gen(cls, conninfo: str = "") -> PQGenConn[t.Self]:
        return _while(cls.patience, super()._connect_gen(conninfo))

    def wait(self, gen: PQGen[RV], interval: float = 0.1, timeout: float | None = None) -> RV:
        limit = self.patience() if timeout is None else timeout
        try:
            return super().wait(_while(self.patience, gen), interval, max(0.0, limit))
        except errors._WaitTimeout as error:  # pyright: ignore[reportPrivateUsage] - psycopg asks callers to convert it
            if timeout is not None:
                raise
            self.pgconn.finish()
            raise psycopg.OperationalError(f"the server did not answer within {limit:.1f} s") from error
        except (psycopg.Error, KeyboardInterrupt, SystemExit):
            raise  # for the last two psycopg has cancelled the statement
        except BaseException:
            # What a signal handler raises, as a soft timeout does. The statement goes on: to leave the session in order
            # would take until its end.
            self.pgconn.finish()
            raise


def _while(patience: Callable[[], float], gen: Generator[Y, t.Any, RV]) -> Generator[Y, t.Any, RV]:
    """The steps of a wait, which psycopg takes every tenth of a second, for as long as there is patience."""
    try:
        state = next(gen)
        while True:
            ready = yield state
            if not ready and patience() <= 0:
                raise errors._WaitTimeout("patience ran out")  # pyright: ignore[reportPrivateUsage] - as above
            state = gen.send(ready)
    except StopIteration as end:
        return t.cast(RV, end.value)


def connect(dsn: str, *, name: str, pooler: bool = False, patience: Callable[[], float] | None = None) -> Session:
    """Open a session in autocommit mode.

    Args:
        dsn: Where to.
        name: Its application_name, unless the connection string gives one.
        pooler: Leave out everything that needs a session of one's own: settings and prepared statements.
        patience: Gives the longest wait in seconds. Default: None, always 30.
    """
    kind = Session if patience is None else _patient(patience)
    session = kind.connect(
        dsn,
        autocommit=True,
        prepare_threshold=None if pooler else 5,
        **parameters(dsn, name),
    )
    try:
        prepare_session(session, pooler)
    except BaseException:
        session.close()
        raise
    return session


def _patient(limit: Callable[[], float]) -> type[Session]:
    class Patient(Session):
        patience = staticmethod(limit)

    return Patient


def parameters(dsn: str, name: str) -> dict[str, t.Any]:
    """What every connection of ours is opened with, unless the connection string says something else."""
    given = conninfo.conninfo_to_dict(dsn)
    wanted: dict[str, t.Any] = {
        "application_name": name,
        "connect_timeout": CONNECT_SECONDS,
        "client_encoding": "UTF8",
        "keepalives_idle": 15,
        "keepalives_interval": 5,
        "keepalives_count": 4,
        "tcp_user_timeout": 30_000,
    }
    return {key: value for key, value in wanted.items() if key not in given or key == "client_encoding"}


def prepare_session(session: Session, pooler: bool) -> None:
    """Set what the statements rely on, or have each transaction say so itself where a pooler stands between."""
    if pooler or not _pin(session):
        # A pooler hands out sessions by transaction, so that each transaction says for itself what it needs.
        session.prepare_threshold = None
        session.isolation_level = psycopg.IsolationLevel.READ_COMMITTED


def _pin(session: Session) -> bool:
    """Set what the statements rely on, unless the server's process is another than the one that we were told of.

    Then a pooler stands between that nobody has mentioned. It may give the session, with all its settings, to others.
    """
    pinned = _PINNED | (_PINNED_SINCE_17 if session.info.server_version >= 170000 else {})
    settings = ", ".join(f"set_config('{name}', '{value}', false)" for name, value in pinned.items())
    ours = f"SELECT {settings} WHERE pg_backend_pid() = {session.info.backend_pid}"
    return session.execute(ours.encode(), prepare=False).fetchone() is not None


def own(session: Session) -> bool:
    """Whether the server's session is ours alone, as far as can be known: no pooler was mentioned or noticed."""
    return session.isolation_level is None


@contextmanager
def together(session: Connection) -> Generator[None]:
    """One round trip and one commit for the statements of the block, at READ COMMITTED; answers are read after it."""
    if session.isolation_level is None:
        with session.pipeline():
            yield
        return
    try:
        with session.pipeline(), session.transaction():
            yield
    except psycopg.Error:
        # A statement that fails in a pipeline takes the end of its transaction along.
        with suppress(psycopg.Error):
            session.rollback()
        raise


class Rows(psycopg.Cursor[TupleRow]):
    """A cursor that reads and writes values as psycopg does by default, on a connection that may do otherwise."""

    @property
    def adapters(self) -> adapt.AdaptersMap:
        return adapters(self.connection)


def run(connection: Connection, query: bytes, parameters: tuple[t.Any, ...] = (), prepare: bool | None = None) -> Rows:
    """Run one statement on any connection; the rows of the cursor returned are tuples."""
    cursor = Rows(connection, row_factory=tuple_row)
    # Binary answers do not depend on the session's DateStyle and IntervalStyle, of which psycopg reads only some as
    # text.
    cursor.execute(query, parameters, prepare=prepare, binary=True)
    return cursor


def array(values: Iterable[object]) -> str:
    """An array literal of numbers or ids; many times faster than adapting a list item by item."""
    return "{" + ",".join(map(str, values)) + "}"


def texts(values: Sequence[str | None]) -> str:
    """An array literal of texts."""
    quoted = {value: "NULL" if value is None else _quoted(value) for value in set(values)}
    return "{" + ",".join(map(quoted.__getitem__, values)) + "}"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def migrate_command(schema: str) -> str:
    """The command that makes or updates a schema."""
    return "venturi migrate" if schema == "venturi" else f"venturi migrate --schema {shlex.quote(schema)}"


@contextmanager
def schema_errors(schema: str) -> Generator[None]:
    """Turn the error of a queue that was never migrated into one that says what to do."""
    try:
        yield
    except (errors.UndefinedTable, errors.InvalidSchemaName, errors.UndefinedColumn) as error:
        what = f"the schema {schema!r} holds no queue of this version: run `{migrate_command(schema)}`"
        raise SchemaError(f"{what} ({error.diag.message_primary})") from error
