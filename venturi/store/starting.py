"""What can be known at the start of a worker about a place where it could never work."""

from __future__ import annotations

import typing as t

import psycopg
from psycopg.rows import tuple_row

from venturi.errors import ConfigError, SchemaError
from venturi.store.connections import Session

__all__ = ["examine", "examine_listening"]

LOOKS = 10
"""How often two sessions are compared."""

# What every worker needs; a right to some columns counts, since it may be enough. The catalog is read without rights
# on the schema.
_FIND = """\
WITH tables AS (
  SELECT c.oid, c.relname::text AS name, n.oid AS schema
    FROM pg_catalog.pg_namespace n JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relkind IN ('r', 'p')
   WHERE n.nspname = %s),
needed(name, privilege) AS (VALUES
  ('versions', 'SELECT'), ('jobs', 'SELECT'), ('live', 'SELECT'), ('live', 'UPDATE'), ('live', 'DELETE'),
  ('journal', 'SELECT'), ('journal', 'INSERT'), ('dead', 'INSERT'), ('cancels', 'SELECT'), ('cancels', 'DELETE'),
  ('workers', 'SELECT'), ('workers', 'INSERT'), ('workers', 'UPDATE'), ('workers', 'DELETE'))
SELECT current_user::text, pg_catalog.pg_is_in_recovery(),
       ARRAY(SELECT DISTINCT 'USAGE on the schema' FROM tables
              WHERE NOT pg_catalog.has_schema_privilege(schema, 'USAGE'))
       || ARRAY(SELECT privilege || ' on ' || name FROM tables JOIN needed USING (name)
                 WHERE NOT CASE privilege WHEN 'DELETE' THEN pg_catalog.has_table_privilege(oid, privilege)
                                ELSE pg_catalog.has_any_column_privilege(oid, privilege) END
                 ORDER BY name, privilege),
       ARRAY(SELECT name FROM tables WHERE pg_catalog.row_security_active(oid) ORDER BY name)
"""


def examine(connection: psycopg.Connection[t.Any], schema: str) -> list[str]:
    """Make sure that the role may work on a queue; what may yet keep it from finding jobs.

    A standby may be promoted, and policies may show the role all there is, so that both are only to be told.

    Raises:
        SchemaError: The role lacks privileges.
    """
    with connection.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(_FIND, (schema,), prepare=False).fetchone()
    role, standby, missing, hidden = t.cast("tuple[str, bool, list[str], list[str]]", row)
    if missing:
        raise SchemaError(f"the role {role!r} may not work on the schema {schema!r}: it lacks {', '.join(missing)}")
    doubts: list[str] = []
    if standby:
        doubts.append(
            f"the server of the schema {schema!r} is a standby: nothing is done before it is promoted; with "
            "target_session_attrs=read-write the connection string leads to the primary"
        )
    if hidden:
        doubts.append(
            f"row-level security is in force for the role {role!r} in the schema {schema!r} ({', '.join(hidden)}): "
            "jobs that its policies hide are never run"
        )
    return doubts


def examine_listening(session: Session, another: Session) -> None:
    """Make sure that a session that leads through a pooler may listen: it must keep the server's process that it has.

    Raises:
        ConfigError: It shares it with another session.
    """
    # More than once, since what other clients do in between can hide it.
    seen = {(_process(session), _process(another)) for _ in range(LOOKS)}
    if len(seen) > 1 or any(ours == others for ours, others in seen):
        raise ConfigError(
            "a worker cannot listen through a pooler that pools by transaction: give the queue pooler=True, and a "
            "listen_dsn that leads to the server itself, or none"
        )


def _process(session: Session) -> int:
    return int(session.execute(b"SELECT pg_backend_pid()", prepare=False).fetchall()[0][0])
