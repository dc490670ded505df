"""The statements on a queue's tables, as templates that are rendered once per queue.

Here are the doorbell's and the producers'; the worker's are in `venturi.store.claiming_sql`, the operators' in
`venturi.store.looking_sql`.

``{q}`` is the quoted schema, ``{now}`` the clock: ``statement_timestamp()`` everywhere, since it advances inside a
pipeline and inside a caller's long transaction, and since it is STABLE, which a distributed UPDATE or DELETE
requires. ``{ring}`` is the producer's part in the doorbell (`venturi.store.doorbell`).

Shapes that keep plans from flipping while statistics are wrong, as a queue's always are: rows of ``live`` are reached
by a lateral look-up with LIMIT, or by ctid, never as one side of a join on an indexed column, nor by an EXISTS in the
output, which may be turned into a hash of the whole table. The views, which join, are read by statements that are never
prepared.
"""

from __future__ import annotations

import datetime as dt
import hashlib
from collections.abc import Collection, Iterable

__all__ = ["LATEST_INSTANT", "OUTCOMES", "Sql", "key64"]

LATEST_INSTANT = dt.datetime(9999, 12, 1, tzinfo=dt.UTC)
"""Later instants stop here, so that every one can be read back as a datetime in any time zone."""

LATEST = f"'{LATEST_INSTANT.isoformat()}'::timestamptz"

OUTCOMES = ("completed", "paused", "retried", "dead", "recovered", "released", "merged", "cancelled", "requeued")
"""The outcomes by their number in the journal."""

_LOCK_CLASS = 0x76656E74

ANY = "any"
"""What a notification says that may be for workers of any kind."""

MANY_KINDS = 50
"""A worker with more kinds parks for all kinds by one lock: every lock takes room in the server's lock table."""


def key64(*parts: str) -> int:
    """A signed 64-bit advisory key for the parts; unequal parts do not collide by being joined."""
    joined = b"\0".join(part.encode() for part in parts)
    return int.from_bytes(hashlib.blake2b(joined, digest_size=8).digest(), "big", signed=True)


def _key32(*parts: str) -> int:
    return key64(*parts) >> 32


class Sql:
    """The statements of one queue.

    Args:
        schema: Its name, unquoted.
        now: The clock, an SQL expression of type timestamptz.
        notify: Whether its enqueues ring the doorbell.

    Attributes:
        channel: Where its workers listen.
        every: The bell that is rung with all others.
    """

    def __init__(self, schema: str, *, now: str = "statement_timestamp()", notify: bool = True) -> None:
        digest = hashlib.blake2b(schema.encode(), digest_size=12).hexdigest()
        self._schema = schema
        self._bells: dict[str, int] = {}
        self.every: int = _key32(schema)
        self.channel: str = f"venturi_{digest}"
        # Doubled percent signs, since every statement is sent with parameters.
        self._names = {
            "q": '"' + schema.replace('"', '""').replace("%", "%%") + '"',
            "now": now,
            "latest": LATEST,
            "parked": str(_LOCK_CLASS),
            "every": str(self.every),
            "any": ANY,
            "inflight": f"{_LOCK_CLASS + 1}, {self.every}",
            "channel": self.channel,
        }
        self._names["ring"] = RING.format_map(self._names) if notify else "NULL::text"
        self._rendered: dict[str, bytes] = {}

    def bell(self, kind: str) -> int:
        """What producers of a kind ring, and workers of it park for."""
        try:
            return self._bells[kind]
        except KeyError:
            return self._bells.setdefault(kind, _key32(self._schema, kind))

    def bells(self, kinds: Collection[str]) -> list[int]:
        """What a worker of these kinds parks for."""
        return [self.every] if len(kinds) > MANY_KINDS else sorted({self.bell(kind) for kind in kinds})

    def rung(self, kinds: Iterable[str]) -> tuple[list[int], str]:
        """The parameters of `RUNG` for jobs of these kinds: one call notifies once, whatever its kinds are."""
        bells = sorted({self.bell(kind) for kind in kinds})
        return bells, str(bells[0]) if len(bells) == 1 else ANY

    def __call__(self, template: str) -> bytes:
        """The statement that the template stands for."""
        try:
            return self._rendered[template]
        except KeyError:
            return self._rendered.setdefault(template, template.format_map(self._names).encode())


# --- The doorbell

# One expression, so that nothing can fail between taking a lock and letting go of it.
RING = """CASE WHEN NOT pg_try_advisory_xact_lock_shared({inflight}) THEN pg_notify('{channel}', bell.kind)::text
     WHEN NOT pg_try_advisory_lock({parked}, bell.key) THEN pg_notify('{channel}', bell.kind)::text
     WHEN pg_advisory_unlock({parked}, bell.key) AND pg_try_advisory_lock({parked}, {every})
     THEN pg_advisory_unlock({parked}, {every})::text
     ELSE pg_notify('{channel}', '{any}')::text END"""
CLOCK = "SELECT {now}"
RUNG = "SELECT {ring} FROM (SELECT unnest(%s::int[]) AS key, %s::text AS kind) bell"
TELL = "SELECT pg_notify('{channel}', 'cancel')"
LISTEN = "LISTEN {channel}"
PARK = "SELECT bell.key, pg_try_advisory_lock_shared({parked}, bell.key) FROM unnest(%s::int[]) bell(key)"
QUIET = "SELECT pg_try_advisory_xact_lock({inflight})"
LEAVE = "SELECT pg_advisory_unlock_shared({parked}, bell.key) FROM unnest(%s::int[]) bell(key)"

# --- Enqueue

INSERT = """
WITH body AS (
  INSERT INTO {q}.jobs (id, kind, payload, priority, dedup_key, trace, created_at)
  VALUES (%s::uuid, %s, %s::jsonb, %s::smallint, %s, %s::jsonb, {now})
  RETURNING id, kind, priority, dedup_key),
hot AS (
  INSERT INTO {q}.live (id, kind, priority, dedup_key, visible_at)
  SELECT b.id, b.kind, b.priority, b.dedup_key,
         least(greatest(coalesce(%s::timestamptz, {now} + %s::interval), {now}), {latest})
    FROM body b
  RETURNING id)
SELECT {ring} FROM hot CROSS JOIN (SELECT %s::int AS key, %s::text AS kind) bell"""

INSERT_MANY = """
WITH given AS MATERIALIZED (
  SELECT s.id, s.kind, s.priority, s.dedup_key, s.payload, s.carry->0 AS carry,
         %s::timestamptz + s.later * interval '1 microsecond' AS visible_at
    FROM ROWS FROM (
           unnest(%s::bigint[], %s::uuid[], %s::text[], %s::smallint[], %s::text[]),
           jsonb_array_elements(%s::jsonb), jsonb_array_elements(%s::jsonb)
         ) AS s(later, id, kind, priority, dedup_key, payload, carry)),
body AS (
  INSERT INTO {q}.jobs (id, kind, payload, priority, dedup_key, trace, created_at)
  SELECT id, kind, payload, priority, dedup_key, %s::jsonb, %s FROM given)
INSERT INTO {q}.live (id, kind, priority, dedup_key, visible_at, carry)
SELECT id, kind, priority, dedup_key, visible_at, carry FROM given"""

# Sorted by the caller: kinds before keys, each by number, so that batches never wait for each other in a circle. The
# setting ends with the transaction, as the locks do, and counts its keys: past the bound whole kinds are locked
# instead, since a full lock table makes others fail too. (A server has room for some 6400 locks by default.)
LOCK_KEYS = """
WITH counted AS MATERIALIZED (
  SELECT set_config(
      'venturi.keys', (coalesce(nullif(current_setting('venturi.keys', true), ''), '0')::bigint + %s)::text, true
    )::bigint > 4000 AS too_many)
SELECT CASE WHEN k.of_kind THEN
         CASE WHEN k.alone OR c.too_many THEN pg_advisory_xact_lock(k.id) ELSE pg_advisory_xact_lock_shared(k.id) END
       WHEN NOT c.too_many THEN pg_advisory_xact_lock(k.id) END
  FROM counted c CROSS JOIN unnest(%s::bigint[], %s::bool[], %s::bool[]) k(id, of_kind, alone)"""

# live_key finds the siblings. Locked and waited for: a claim that holds the row makes it no candidate any more.
CANDIDATES = """
SELECT k.n, c.live_tid::text, c.body_tid::text, c.id, k.kind, c.payload::text, c.carry::text, c.run_count,
       c.failure_count, c.priority, c.visible_at, c.created_at
  FROM unnest(%s::int[], %s::text[], %s::text[]) k(n, kind, key)
 CROSS JOIN LATERAL (
   SELECT l.ctid AS live_tid, b.ctid AS body_tid, l.id, b.payload, l.carry, l.run_count, l.failure_count,
          l.priority, l.visible_at, b.created_at
     FROM {q}.live l
     JOIN {q}.jobs b ON b.id = l.id
    WHERE l.kind = k.kind AND l.dedup_key = k.key AND l.owner IS NULL AND l.id <> ALL (%s::uuid[])
    ORDER BY b.created_at, l.id LIMIT %s
      FOR UPDATE) c"""

# The rows are locked by CANDIDATES in this transaction, so that their ctids hold. A merge that rewrites the body always
# rewrites the live row too: otherwise a claim with an older snapshot would take the job with its old payload.
MERGE = """
WITH given AS MATERIALIZED (
  SELECT (x->>0)::tid AS live_tid, (x->>1)::tid AS body_tid, x->2 AS payload, (x->>3)::smallint AS priority,
         (x->>4)::timestamptz AS visible_at, x->5->0 AS carry, (x->>6)::bigint AS failure_count
    FROM jsonb_array_elements(%s::jsonb) x),
body AS (
  UPDATE {q}.jobs b SET payload = g.payload, priority = g.priority, trace = %s::jsonb
    FROM given g WHERE b.ctid = g.body_tid)
UPDATE {q}.live l
   SET priority = g.priority, visible_at = g.visible_at, carry = g.carry, failure_count = g.failure_count
  FROM given g WHERE l.ctid = g.live_tid"""

MERGED = """
INSERT INTO {q}.journal (job_id, run_no, failure_count, recorded_at, outcome, kind, note, evidence)
SELECT (x->>0)::uuid, (x->>1)::bigint, (x->>2)::bigint, {now}, 6, x->>3, x->>4, x->5
  FROM jsonb_array_elements(%s::jsonb) WITH ORDINALITY AS e(x, n) ORDER BY n"""
