"""The worker's statements, as templates for `venturi.store.sql.Sql`: claim, settle, and what the maintainer does."""

from __future__ import annotations

__all__ = [
    "CLAIM",
    "CLAIM_CAPPED",
    "CLAIM_MANY",
    "EXPIRED",
    "HEARTBEAT",
    "LEFT",
    "NEXT_DUE",
    "PRUNE_WORKERS",
    "RENEW",
    "SETTLE",
    "SLOTS",
    "STRAYS",
    "SWEEP_CANCELS",
    "TOLD",
]

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
def _claim(peeked: str, choice: str) -> str:
    """The statement that claims what ``choice`` chooses among the rows of ``peeked``."""
    return f"""
WITH {peeked},
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


def _look(lanes: str, first: str, last: str) -> str:
    """The lanes ``a`` with the oldest ready rows ``p`` of each, between two instants and no more than its depth."""
    # The depth is a column: for a number that is known to it the planner may choose to read a lane as a whole.
    return f"""{lanes}
   CROSS JOIN LATERAL (
     SELECT l.ctid AS tid, l.visible_at FROM {{q}}.live l
      WHERE l.kind = a.kind AND l.priority = a.tier AND l.visible_at >= {first} AND l.visible_at <= {last}
        AND l.owner IS NULL
      ORDER BY l.visible_at LIMIT a.depth) p"""


def _peeked(look: str) -> str:
    return f"""peeked AS MATERIALIZED (
  SELECT p.tid, p.visible_at, a.tier, a.room, a.task
    FROM {look})"""


def _chosen(source: str) -> str:
    return f"""
chosen AS MATERIALIZED (
  SELECT c.tid FROM ({_placed(source, "true")}) c ORDER BY c.position, c.visible_at LIMIT %s)"""


_FIRST_LOOK = _look(
    """unnest(%s::text[], %s::smallint[], %s::int[], %s::int[], %s::int[], %s::float8[])
           a(kind, tier, task, room, depth, mark)""",
    "to_timestamp(a.mark)",
    "{now}",
)

CLAIM = _claim(_peeked(_FIRST_LOOK), _chosen("peeked"))

# The same for many lanes, whose depths are less than there is room for, and whose rooms no cap limits. The first look
# shows how far each lane has to be read: to the instant at which the tier has enough rows, and for no more rows than
# are left by those that come before its own.
CLAIM_MANY = _claim(
    f"""near AS (
  SELECT a.kind, a.tier, a.task, a.room, p.visible_at, row_number() OVER oldest AS place,
         nth_value(p.visible_at, a.room) OVER oldest AS enough
    FROM {_FIRST_LOOK}
  WINDOW oldest AS (
    PARTITION BY a.tier ORDER BY p.visible_at ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING)),
lanes AS MATERIALIZED (
  SELECT kind, tier, task, room, min(visible_at) AS head, coalesce(min(enough), {{now}}) AS enough,
         room - min(place) + 1 AS depth
    FROM near GROUP BY kind, tier, task, room HAVING min(place) <= room),
{_peeked(_look("lanes a", "a.head", "a.enough"))}""",
    _chosen("peeked"),
)

# Where a cap leaves less room than there are free slots: each task by itself keeps as many candidates as it has room
# for, by the rotation, and those that are kept are placed all together, so that what has no room takes nobody's turn.
CLAIM_CAPPED = _claim(
    _peeked(_FIRST_LOOK),
    f"""
kept AS (
  SELECT r.* FROM (
    SELECT t.*, row_number() OVER (PARTITION BY t.task ORDER BY t.position, t.visible_at) AS taken
      FROM ({_placed("peeked", "f.task")}) t) r
   WHERE taken <= room),
{_chosen("kept")}""",
)

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
# The range, which excludes nothing, keeps them in the order of the index: without statistics a lane is taken for so
# short that all of it would be read and sorted.
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
           WHERE l.kind = a.kind AND l.priority = a.priority AND l.visible_at BETWEEN '-infinity' AND 'infinity'
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
    WHERE l.kind = a.kind AND l.priority = a.tier AND l.visible_at BETWEEN '-infinity' AND 'infinity'
    ORDER BY l.visible_at LIMIT %s) s
 WHERE s.owner = %s
   AND NOT EXISTS (SELECT FROM unnest(%s::uuid[], %s::bigint[]) k(id, run) WHERE k.id = s.id AND k.run = s.run_count)"""

SLOTS = "SELECT coalesce(sum(slots), 0) FROM {q}.workers"

# --- Cancelled claims

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
