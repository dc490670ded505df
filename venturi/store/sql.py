"""Every statement on a queue's tables, as templates that are rendered once per queue.

``{q}`` is the quoted schema, ``{now}`` the clock: ``statement_timestamp()`` everywhere, since it advances inside a
pipeline and inside a caller's long transaction, and since it is STABLE, which a distributed UPDATE or DELETE
requires. ``{ring}`` is the producer's part in the doorbell (`venturi.store.doorbell`).

Shapes that keep plans from flipping while statistics are wrong, as a queue's always are: rows of ``live`` are reached
by a lateral look-up with LIMIT, or by ctid, never as one side of a join on an indexed column, nor by an EXISTS in the
output, which may be turned into a hash of the whole table.
"""

from __future__ import annotations

import datetime as dt
import hashlib
from collections.abc import Collection

__all__ = ["LATEST_INSTANT", "OUTCOMES", "Sql", "key64"]

LATEST_INSTANT = dt.datetime(9999, 12, 1, tzinfo=dt.UTC)
"""Later instants stop here, so that every one can be read back as a datetime in any time zone."""

LATEST = f"'{LATEST_INSTANT.isoformat()}'::timestamptz"

OUTCOMES = ("completed", "paused", "retried", "dead", "recovered", "released", "merged", "cancelled", "requeued")
"""The outcomes by their number in the journal."""

_LOCK_CLASS = 0x76656E74

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
        key = _key32(schema)
        self._schema = schema
        self._bells: dict[str, int] = {}
        self.every: int = key
        self.channel: str = f"venturi_{digest}"
        # Doubled percent signs, since every statement is sent with parameters.
        self._names = {
            "q": '"' + schema.replace('"', '""').replace("%", "%%") + '"',
            "now": now,
            "latest": LATEST,
            "parked": f"{_LOCK_CLASS}",
            "every": f"{key}",
            "inflight": f"{_LOCK_CLASS + 1}, {key}",
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

    def __call__(self, template: str) -> bytes:
        """The statement that the template stands for."""
        try:
            return self._rendered[template]
        except KeyError:
            return self._rendered.setdefault(template, template.format_map(self._names).encode())


# --- The doorbell

# One expression, so that nothing can fail between taking a lock and letting go of it.
RING = """CASE WHEN NOT pg_try_advisory_xact_lock_shared({inflight}) THEN pg_notify('{channel}', '')::text
     WHEN NOT pg_try_advisory_lock({parked}, bell.key) THEN pg_notify('{channel}', '')::text
     WHEN pg_advisory_unlock({parked}, bell.key) AND pg_try_advisory_lock({parked}, {every})
     THEN pg_advisory_unlock({parked}, {every})::text
     ELSE pg_notify('{channel}', '')::text END"""
CLOCK = "SELECT {now}"
RUNG = "SELECT {ring} FROM unnest(%s::int[]) bell(key)"
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
SELECT {ring} FROM hot CROSS JOIN (SELECT %s::int AS key) bell"""

# The rows of one batch become visible a microsecond apart, backwards from the instant given, so that all of them are
# due at once and the order in which they were given holds without an id in the index.
INSERT_MANY = """
WITH given AS MATERIALIZED (
  SELECT (x->>0)::uuid AS id, x->>1 AS kind, x->2 AS payload, (x->>3)::smallint AS priority, x->>4 AS dedup_key,
         nullif(x->5, 'null'::jsonb) AS trace, (x->>6)::timestamptz AS visible_at, (x->>7)::timestamptz AS created_at,
         x->8->0 AS carry
    FROM jsonb_array_elements(%s::jsonb) x),
body AS (
  INSERT INTO {q}.jobs (id, kind, payload, priority, dedup_key, trace, created_at)
  SELECT id, kind, payload, priority, dedup_key, trace, created_at FROM given)
INSERT INTO {q}.live (id, kind, priority, dedup_key, visible_at, carry)
SELECT id, kind, priority, dedup_key, visible_at, carry FROM given"""

COPY_JOBS = "COPY {q}.jobs (id, kind, payload, priority, trace, created_at) FROM STDIN (FORMAT binary)"
APPEND_LIVE = """
INSERT INTO {q}.live (id, kind, priority, visible_at)
SELECT id, kind, priority, %s::timestamptz + (n - 1) * interval '1 microsecond'
  FROM unnest(%s::uuid[], %s::text[], %s::smallint[]) WITH ORDINALITY s(id, kind, priority, n)
 ORDER BY n"""

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
SELECT k.n, c.live_tid::text, c.body_tid::text, c.id, c.payload::text, c.carry::text, c.run_count, c.failure_count,
       c.priority, c.visible_at, c.created_at
  FROM unnest(%s::int[], %s::text[], %s::text[]) k(n, kind, key)
 CROSS JOIN LATERAL (
   SELECT l.ctid AS live_tid, b.ctid AS body_tid, l.id, b.payload, l.carry, l.run_count, l.failure_count,
          l.priority, l.visible_at, b.created_at
     FROM {q}.live l
     JOIN {q}.jobs b ON b.id = l.id
    WHERE l.kind = k.kind AND l.dedup_key = k.key AND l.owner IS NULL AND l.id <> ALL (%s::uuid[])
    ORDER BY b.created_at, l.id LIMIT 1
      FOR UPDATE) c"""

# The rows are locked by CANDIDATES in this transaction, so that their ctids hold. A merge that rewrites the body always
# rewrites the live row too: otherwise a claim with an older snapshot would take the job with its old payload.
MERGE = """
WITH given AS MATERIALIZED (
  SELECT (x->>0)::tid AS live_tid, (x->>1)::tid AS body_tid, x->2 AS payload, (x->>3)::smallint AS priority,
         (x->>4)::timestamptz AS visible_at, x->5->0 AS carry, (x->>6)::bigint AS failure_count,
         nullif(x->7, 'null'::jsonb) AS trace
    FROM jsonb_array_elements(%s::jsonb) x),
body AS (
  UPDATE {q}.jobs b SET payload = g.payload, priority = g.priority, trace = g.trace
    FROM given g WHERE b.ctid = g.body_tid)
UPDATE {q}.live l
   SET priority = g.priority, visible_at = g.visible_at, carry = g.carry, failure_count = g.failure_count
  FROM given g WHERE l.ctid = g.live_tid"""

MERGED = """
INSERT INTO {q}.journal (job_id, run_no, failure_count, recorded_at, outcome, kind, note, evidence)
SELECT (x->>0)::uuid, (x->>1)::bigint, (x->>2)::bigint, {now}, 6, x->>3, x->>4, x->5
  FROM jsonb_array_elements(%s::jsonb) WITH ORDINALITY AS e(x, n) ORDER BY n"""

# --- Claim


def _placed(source: str, group: str) -> str:
    """The rows of ``source`` with their positions in the rotation, as if there were no others than those of the group.

    A row gets the position that its rank within its tier earns, or one after all positions when its tier has no more
    of them; those are ordered by the fallback of the tier that was short of jobs.
    """
    return f"""
  SELECT p.*, coalesce(
      (CASE p.tier WHEN 0 THEN s.high WHEN 1 THEN s.normal ELSE s.low END)[p.rank],
      1000000 + CASE WHEN p.highs < cardinality(s.high) THEN p.tier
                     WHEN p.normals < cardinality(s.normal) THEN (p.tier + 1) %% 3
                     ELSE p.tier END) AS position
    FROM turns s, (
      SELECT f.tid, f.visible_at, f.tier, f.task, f.room,
             row_number() OVER (PARTITION BY {group}, f.tier ORDER BY f.visible_at) AS rank,
             count(*) FILTER (WHERE f.tier = 0) OVER (PARTITION BY {group}) AS highs,
             count(*) FILTER (WHERE f.tier = 1) OVER (PARTITION BY {group}) AS normals
        FROM {source} f) p"""


# live_lane serves each lane's look at its head, which locks nothing. Only the chosen are locked.
def _claim(choice: str) -> str:
    """The statement that claims what ``choice`` chooses among the rows of ``peeked``."""
    return f"""
WITH peeked AS MATERIALIZED (
  SELECT p.tid, p.visible_at, a.tier, a.room, a.task
    FROM unnest(%s::text[], %s::smallint[], %s::int[], %s::int[], %s::int[], %s::float8[])
           a(kind, tier, task, room, depth, mark)
   CROSS JOIN LATERAL (
     SELECT l.ctid AS tid, l.visible_at FROM {{q}}.live l
      WHERE l.kind = a.kind AND l.priority = a.tier AND l.visible_at >= to_timestamp(a.mark) AND l.visible_at <= {{now}}
        AND l.owner IS NULL
      ORDER BY l.visible_at LIMIT a.depth) p),
turns AS (SELECT %s::int[] AS high, %s::int[] AS normal, %s::int[] AS low),
{choice},
claimed AS (
  UPDATE {{q}}.live l
     SET owner = %s, lease_until = {{now}} + %s::interval, run_count = least(l.run_count, 9223372036854775806) + 1
   WHERE l.ctid = ANY (ARRAY(
           SELECT f.tid FROM chosen c CROSS JOIN LATERAL (
             SELECT r.ctid AS tid FROM {{q}}.live r WHERE r.ctid = c.tid AND r.owner IS NULL AND r.visible_at <= {{now}}
                FOR UPDATE SKIP LOCKED) f))
  RETURNING l.id, l.kind, l.priority, l.run_count, l.failure_count, l.carry, l.visible_at)
SELECT (SELECT count(*) FROM chosen), c.id::text, c.kind, c.priority, c.run_count, c.failure_count, c.carry::text,
       extract(epoch FROM c.visible_at)::float8, extract(epoch FROM {{now}} - c.visible_at)::float8,
       b.payload::text, b.trace::text
  FROM (SELECT 1) one
  LEFT JOIN claimed c ON true
  LEFT JOIN LATERAL (SELECT j.payload, j.trace FROM {{q}}.jobs j WHERE j.id = c.id LIMIT 1) b ON true"""


def _chosen(source: str) -> str:
    return f"""
chosen AS MATERIALIZED (
  SELECT c.tid FROM ({_placed(source, "true")}) c ORDER BY c.position, c.visible_at LIMIT %s)"""


CLAIM = _claim(_chosen("peeked"))

# Where a cap leaves less room than there are free slots: each task by itself keeps as many candidates as it has room
# for, by the rotation, and those that are kept are placed all together, so that what has no room takes nobody's turn.
CLAIM_CAPPED = _claim(f"""
kept AS (
  SELECT r.* FROM (
    SELECT t.*, row_number() OVER (PARTITION BY t.task ORDER BY t.position, t.visible_at) AS taken
      FROM ({_placed("peeked", "f.task")}) t) r
   WHERE taken <= room),
{_chosen("kept")}""")

# Seconds until the first unclaimed job of the lanes is due; ready ones count, so that nothing is parked over.
NEXT_DUE = """
SELECT extract(epoch FROM min(d.visible_at) - {now})::float8
  FROM unnest(%s::text[], %s::smallint[]) a(kind, tier)
 CROSS JOIN LATERAL (
   SELECT l.visible_at FROM {q}.live l
    WHERE l.kind = a.kind AND l.priority = a.tier AND l.owner IS NULL
    ORDER BY l.visible_at LIMIT 1) d"""

# --- Settle, release, recover

# Every way in which a claim ends, guarded by id, owner and run_count, and for a recovery by the end of the lease too.
# It never waits for a row (SKIP LOCKED): a renewal or a merge may hold it. Locked is not lost: the answer names what
# was not settled and says whether the claim still stands as asked ("ours"), or whether this very end is in the
# journal already ("done": the answer to an earlier try was lost), or neither. A renewal that commits between this
# statement's snapshot and its lock leaves a version that the lock follows but DELETE and UPDATE do not see: what
# counts is what they changed.
SETTLE = """
WITH given AS MATERIALIZED (
  SELECT s.*, d.note, d.traceback, d.evidence, d.carry
    FROM unnest(%s::uuid[], %s::bigint[], %s::uuid[], %s::smallint[], %s::bigint[], %s::bigint[])
           WITH ORDINALITY AS s(id, run, owner, outcome, delay, duration, n)
    LEFT JOIN jsonb_to_recordset(%s::jsonb) AS d(n int, note text, traceback text, evidence jsonb, carry jsonb)
      ON d.n = s.n),
held AS MATERIALIZED (
  SELECT g.n, g.id, g.run, g.owner, g.outcome, g.delay, g.duration, g.note, g.traceback, g.evidence, l.tid, l.kind,
         CASE WHEN g.outcome IN (2, 3, 4) THEN least(l.failure_count, 9223372036854775806) + 1
              ELSE l.failure_count END AS failure_count,
         CASE WHEN g.carry IS NULL THEN l.carry ELSE g.carry->0 END AS carry
    FROM given g CROSS JOIN LATERAL (
      SELECT r.ctid AS tid, r.kind, r.failure_count, r.carry FROM {q}.live r
       WHERE r.id = g.id AND r.run_count = g.run AND r.owner = g.owner
         AND (NOT %s::bool OR r.lease_until < {now})
       LIMIT 1 FOR UPDATE SKIP LOCKED) l),
gone AS (
  DELETE FROM {q}.live r WHERE r.ctid = ANY (ARRAY(SELECT tid FROM held WHERE outcome IN (0, 3, 7)))
  RETURNING r.id),
again AS (
  UPDATE {q}.live r
     SET owner = NULL, lease_until = NULL, failure_count = h.failure_count, carry = h.carry,
         visible_at = least({now} + h.delay * interval '1 microsecond', {latest})
    FROM held h WHERE r.ctid = h.tid AND h.outcome IN (1, 2, 4, 5)
  RETURNING r.id),
ended AS MATERIALIZED (
  SELECT * FROM held WHERE id IN (SELECT id FROM gone UNION ALL SELECT id FROM again)),
buried AS (
  INSERT INTO {q}.dead (id, kind, died_at, run_count, failure_count, carry)
  SELECT id, kind, {now}, run, failure_count, carry FROM ended WHERE outcome = 3),
written AS (
  INSERT INTO {q}.journal (job_id, run_no, failure_count, recorded_at, outcome, kind, worker, duration, note, traceback,
                           evidence)
  SELECT id, run, failure_count, {now}, outcome, kind, owner, duration * interval '1 microsecond', note, traceback,
         evidence
    FROM ended ORDER BY n)
SELECT g.id::text, g.run, o.there IS NOT NULL AS ours, d.there IS NOT NULL AS done
  FROM given g
  LEFT JOIN LATERAL (
    SELECT true AS there FROM {q}.live r
     WHERE r.id = g.id AND r.run_count = g.run AND r.owner = g.owner AND (NOT %s::bool OR r.lease_until < {now})
     LIMIT 1) o ON true
  LEFT JOIN LATERAL (
    SELECT true AS there FROM {q}.journal e
     WHERE e.job_id = g.id AND e.run_no = g.run AND e.worker = g.owner AND e.outcome = g.outcome LIMIT 1) d ON true
 WHERE NOT EXISTS (SELECT FROM ended e WHERE e.n = g.n)"""

# --- The maintainer

# Locks with SKIP LOCKED like SETTLE, so that the two never wait for each other. A row that is only locked is renewed
# next time.
RENEW = """
WITH given AS MATERIALIZED (SELECT * FROM unnest(%s::uuid[], %s::bigint[]) AS s(id, run)),
held AS MATERIALIZED (
  SELECT l.tid FROM given g CROSS JOIN LATERAL (
    SELECT r.ctid AS tid FROM {q}.live r
     WHERE r.id = g.id AND r.run_count = g.run AND r.owner = %s LIMIT 1 FOR UPDATE SKIP LOCKED) l),
renewed AS (
  UPDATE {q}.live r SET lease_until = {now} + %s::interval WHERE r.ctid = ANY (ARRAY(SELECT tid FROM held))
  RETURNING r.id)
SELECT g.id::text, n.id IS NOT NULL, o.there IS NOT NULL
  FROM given g
  LEFT JOIN renewed n ON n.id = g.id
  LEFT JOIN LATERAL (
    SELECT true AS there FROM {q}.live r
     WHERE r.id = g.id AND r.run_count = g.run AND r.owner = %s LIMIT 1) o ON true"""

HEARTBEAT = """
INSERT INTO {q}.workers (id, host, pid, slots, kinds, lease, started_at, seen_at)
VALUES (%s, %s, %s, %s, %s, %s, {now}, {now})
ON CONFLICT (id) DO UPDATE SET seen_at = excluded.seen_at"""

LEFT = "DELETE FROM {q}.workers WHERE id = %s"

PRUNE_WORKERS = """
DELETE FROM {q}.workers WHERE ctid = ANY (ARRAY(
  SELECT ctid FROM {q}.workers WHERE seen_at < {now} - 10 * lease LIMIT 100 FOR UPDATE SKIP LOCKED))"""

# No index names the lease, since one would make every claim and renewal cost an index entry. But claims are taken from
# the head of a lane, so that the claimed rows of a lane stand among its first ones: as many as all workers have slots,
# and some more for what was passed over. The lanes are found by skipping through live_lane. A depth of NULL reads all.
EXPIRED = """
WITH RECURSIVE lanes(kind, priority) AS (
  (SELECT l.kind, l.priority FROM {q}.live l ORDER BY l.kind, l.priority LIMIT 1)
  UNION ALL
  SELECT n.kind, n.priority FROM lanes p CROSS JOIN LATERAL (
    SELECT l.kind, l.priority FROM {q}.live l
     WHERE (l.kind, l.priority) > (p.kind, p.priority) ORDER BY l.kind, l.priority LIMIT 1) n)
SELECT h.id::text, h.kind, h.run_count, h.owner, h.failure_count, w.host, w.pid,
       EXISTS (SELECT FROM {q}.cancels c WHERE c.job_id = h.id AND c.run_count <= h.run_count)
  FROM (SELECT e.* FROM lanes a CROSS JOIN LATERAL (
          SELECT l.id, l.kind, l.run_count, l.owner, l.failure_count, l.lease_until FROM {q}.live l
           WHERE l.kind = a.kind AND l.priority = a.priority
           ORDER BY l.visible_at LIMIT %s) e
         WHERE e.lease_until < {now}
         ORDER BY e.lease_until LIMIT %s) h
  LEFT JOIN {q}.workers w ON w.id = h.owner
 ORDER BY h.lease_until"""

# Claims of this worker that it does not know of, looked for like EXPIRED.
STRAYS = """
SELECT s.id::text, s.kind, s.run_count
  FROM unnest(%s::text[], %s::smallint[]) a(kind, tier)
 CROSS JOIN LATERAL (
   SELECT l.id, l.kind, l.run_count, l.owner FROM {q}.live l
    WHERE l.kind = a.kind AND l.priority = a.tier
    ORDER BY l.visible_at LIMIT %s) s
 WHERE s.owner = %s
   AND NOT EXISTS (SELECT FROM unnest(%s::uuid[], %s::bigint[]) k(id, run) WHERE k.id = s.id AND k.run = s.run_count)"""

SLOTS = "SELECT coalesce(sum(slots), 0) FROM {q}.workers"

# --- Cancel

CANCEL_PENDING = """
WITH gone AS (
  DELETE FROM {q}.live l WHERE l.id = %s AND l.owner IS NULL
  RETURNING l.id, l.kind, l.run_count, l.failure_count)
INSERT INTO {q}.journal (job_id, run_no, failure_count, recorded_at, outcome, kind)
SELECT id, run_count, failure_count, {now}, 7, kind FROM gone
RETURNING job_id"""

# A request beside the live row instead of on it: an open transaction that cancels delays neither settle nor renewal.
CANCEL_CLAIMED = """
INSERT INTO {q}.cancels (job_id, run_count, requested_at)
SELECT l.id, l.run_count, {now} FROM {q}.live l WHERE l.id = %s AND l.owner IS NOT NULL
ON CONFLICT (job_id, run_count) DO UPDATE SET requested_at = excluded.requested_at
RETURNING job_id"""

TOLD = """
SELECT c.job_id::text, c.run_count FROM {q}.cancels c WHERE c.job_id = ANY (%s::uuid[])"""

# What became of the claims that a request spoke of: back to pending = cancelled now; gone = the request is too.
SWEEP_CANCELS = """
WITH asked AS MATERIALIZED (SELECT DISTINCT c.job_id FROM {q}.cancels c LIMIT 1000),
held AS MATERIALIZED (
  SELECT l.tid FROM asked a CROSS JOIN LATERAL (
    SELECT r.ctid AS tid FROM {q}.live r
     WHERE r.id = a.job_id AND r.owner IS NULL LIMIT 1 FOR UPDATE SKIP LOCKED) l),
gone AS (
  DELETE FROM {q}.live r WHERE r.ctid = ANY (ARRAY(SELECT tid FROM held))
  RETURNING r.id, r.kind, r.run_count, r.failure_count),
written AS (
  INSERT INTO {q}.journal (job_id, run_no, failure_count, recorded_at, outcome, kind)
  SELECT id, run_count, failure_count, {now}, 7, kind FROM gone)
DELETE FROM {q}.cancels c
 WHERE c.job_id IN (
   SELECT a.job_id FROM asked a
    WHERE a.job_id IN (SELECT id FROM gone)
       OR NOT EXISTS (SELECT FROM {q}.live r WHERE r.id = a.job_id))"""

# --- Requeue

REQUEUE = """
WITH risen AS (
  DELETE FROM {q}.dead d WHERE d.id = ANY (ARRAY(
    SELECT x.id FROM {q}.dead x
     WHERE (%s::uuid IS NULL OR x.id = %s) AND (%s::text[] IS NULL OR x.kind = ANY (%s))
     ORDER BY x.died_at LIMIT %s FOR UPDATE SKIP LOCKED))
  RETURNING d.id, d.died_at, d.run_count, d.carry),
hot AS (
  INSERT INTO {q}.live (id, kind, priority, dedup_key, visible_at, run_count, carry)
  SELECT r.id, j.kind, j.priority, j.dedup_key, least({now} + %s::interval, {latest}), r.run_count, r.carry
    FROM risen r CROSS JOIN LATERAL (
      SELECT b.kind, b.priority, b.dedup_key FROM {q}.jobs b WHERE b.id = r.id LIMIT 1) j
   ORDER BY r.died_at
  RETURNING id, kind, run_count),
written AS (
  INSERT INTO {q}.journal (job_id, run_no, failure_count, recorded_at, outcome, kind)
  SELECT id, run_count, 0, {now}, 8, kind FROM hot),
withdrawn AS (DELETE FROM {q}.cancels c WHERE c.job_id IN (SELECT id FROM hot))
SELECT count(*), coalesce(array_agg(DISTINCT kind), '{{}}') FROM hot"""

# --- Look

_JOB = """SELECT id, kind, status, priority, payload::text, carry::text, dedup_key, run_count, failure_count,
       created_at, visible_at, owner, lease_until, finished_at FROM {q}.all_jobs"""

JOB = _JOB + " WHERE id = %s"

# A page of rows with such columns, newest first.
_PAGE = """(%s::text[] IS NULL OR kind = ANY (%s)) AND (%s::uuid IS NULL OR id < %s)
   AND (%s::timestamptz IS NULL OR finished_at >= %s) AND (%s::timestamptz IS NULL OR finished_at < %s)
 ORDER BY id DESC LIMIT %s"""

JOBS = f"{_JOB} WHERE (%s::text IS NULL OR status = %s) AND {_PAGE}"

# Jobs of these statuses are looked for where they are, and not in all of history.
JOBS_OF = {
    status: f"{_JOB} WHERE id IN (SELECT id FROM ({rows}) found WHERE {_PAGE}) ORDER BY id DESC"
    for status, rows in (
        ("pending", "SELECT id, kind, NULL::timestamptz AS finished_at FROM {q}.live WHERE owner IS NULL"),
        ("claimed", "SELECT id, kind, NULL::timestamptz AS finished_at FROM {q}.live WHERE owner IS NOT NULL"),
        ("dead", "SELECT id, kind, died_at AS finished_at FROM {q}.dead"),
    )
}

PENDING = """
SELECT l.kind, j.payload::text FROM {q}.live l JOIN {q}.jobs j ON j.id = l.id
 WHERE l.owner IS NULL AND (%s::text[] IS NULL OR l.kind = ANY (%s))
 ORDER BY l.priority, l.visible_at"""

# The newest entries, put back into the order in which they were written.
JOURNAL = """
SELECT * FROM (
  SELECT id, job_id, kind, run_no, failure_count, outcome, recorded_at, duration, worker, note, traceback,
         evidence::text
    FROM {q}.all_entries WHERE job_id = %s ORDER BY id DESC LIMIT %s) newest
 ORDER BY id"""

STATS = """
WITH unfinished AS (
  SELECT kind,
         count(*) FILTER (WHERE owner IS NULL AND visible_at <= {now}) AS ready,
         count(*) FILTER (WHERE owner IS NULL AND visible_at > {now}) AS scheduled,
         count(*) FILTER (WHERE owner IS NOT NULL) AS claimed,
         {now} - min(visible_at) FILTER (WHERE owner IS NULL AND visible_at <= {now}) AS oldest
    FROM {q}.live GROUP BY kind),
buried AS (SELECT kind, count(*) AS dead FROM {q}.dead GROUP BY kind),
working AS (SELECT kinds FROM {q}.workers WHERE seen_at > {now} - lease)
SELECT coalesce(u.kind, b.kind), coalesce(u.ready, 0), coalesce(u.scheduled, 0), coalesce(u.claimed, 0),
       coalesce(b.dead, 0), u.oldest, EXISTS (SELECT FROM working w WHERE coalesce(u.kind, b.kind) = ANY (w.kinds)),
       (SELECT count(*) FROM working)
  FROM unfinished u FULL JOIN buried b ON b.kind = u.kind
UNION ALL
SELECT NULL, 0, 0, 0, 0, NULL, false, (SELECT count(*) FROM working)
 ORDER BY 1"""

# --- Cleanup

# journal_finished finds the oldest. A job that was requeued has a later end, or none yet, which counts instead.
CLEANUP = """
WITH ended AS MATERIALIZED (
  SELECT e.job_id FROM {q}.journal e
   WHERE e.outcome IN (0, 3, 7) AND e.outcome = ANY (%s::smallint[]) AND e.recorded_at < %s
     AND (%s::text[] IS NULL OR e.kind = ANY (%s))
     AND NOT EXISTS (SELECT FROM {q}.live l WHERE l.id = e.job_id)
     AND NOT EXISTS (SELECT FROM {q}.journal n
                      WHERE n.job_id = e.job_id AND n.id > e.id AND n.outcome IN (0, 3, 7, 8))
   ORDER BY e.recorded_at LIMIT %s),
doomed AS MATERIALIZED (
  SELECT j.id FROM ended e CROSS JOIN LATERAL (
    SELECT b.id FROM {q}.jobs b WHERE b.id = e.job_id LIMIT 1 FOR UPDATE SKIP LOCKED) j),
bodies AS (DELETE FROM {q}.jobs b WHERE b.id IN (SELECT id FROM doomed) RETURNING 1),
entries AS (DELETE FROM {q}.journal e WHERE e.job_id IN (SELECT id FROM doomed)),
graves AS (DELETE FROM {q}.dead d WHERE d.id IN (SELECT id FROM doomed))
SELECT count(*) FROM bodies"""
