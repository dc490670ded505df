"""The operators' statements, as templates for `venturi.store.sql.Sql`: cancel, requeue, look, count, clean up."""

from __future__ import annotations

__all__ = [
    "CANCEL_CLAIMED",
    "CANCEL_PENDING",
    "CLEANUP",
    "JOB",
    "JOBS",
    "JOBS_BETWEEN",
    "JOBS_OF",
    "JOURNAL",
    "PENDING",
    "REQUEUE",
    "STATS",
]

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

# Jobs that finished between two instants. Where few have, journal_finished finds them; where many have, a page of them
# is soon full, from the newest job on.
JOBS_BETWEEN = f"""
WITH ended AS MATERIALIZED (
  SELECT e.job_id FROM {{q}}.journal e
   WHERE e.outcome IN (0, 3, 7) AND e.recorded_at >= coalesce(%s, '-infinity'::timestamptz)
     AND e.recorded_at < coalesce(%s, 'infinity'::timestamptz)
   LIMIT 10001),
few AS (SELECT count(*) < 10001 AS few FROM ended)
(SELECT j.* FROM (SELECT DISTINCT job_id FROM ended WHERE (SELECT few FROM few)) e
  CROSS JOIN LATERAL ({_JOB} WHERE id = e.job_id LIMIT 1) j
  WHERE (%s::text IS NULL OR status = %s) AND {_PAGE})
UNION ALL
({_JOB} WHERE NOT (SELECT few FROM few) AND (%s::text IS NULL OR status = %s) AND {_PAGE})"""

# Jobs of these statuses are looked for where they are, and not in all of history.
JOBS_OF = {
    status: f"{_JOB} WHERE id IN (SELECT id FROM ({rows}) found WHERE {_PAGE}) ORDER BY id DESC"
    for status, rows in (
        ("pending", "SELECT id, kind, NULL::timestamptz AS finished_at FROM {q}.live WHERE owner IS NULL"),
        ("claimed", "SELECT id, kind, NULL::timestamptz AS finished_at FROM {q}.live WHERE owner IS NOT NULL"),
        ("dead", "SELECT id, kind, died_at AS finished_at FROM {q}.dead"),
        ("cancelled", "SELECT job_id AS id, kind, recorded_at AS finished_at FROM {q}.journal WHERE outcome = 7"),
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

# journal_finished finds the oldest. A job that was requeued has a later end, or none yet, which counts instead. The
# ORDER BY underneath and OFFSET 0 make both guards look-ups that end with the LIMIT: as anti joins they may come before
# a sort, for every finished job there is. A dead job goes only with its grave, which a requeue that this snapshot does
# not see holds or has taken away.
CLEANUP = """
WITH ended AS (
  SELECT e.job_id, e.outcome FROM (
    SELECT o.job_id, o.id, o.outcome FROM {q}.journal o
     WHERE o.outcome IN (0, 3, 7) AND o.outcome = ANY (%s::smallint[]) AND o.recorded_at < %s
       AND (%s::text[] IS NULL OR o.kind = ANY (%s))
     ORDER BY o.recorded_at) e
   WHERE NOT EXISTS (SELECT FROM {q}.live l WHERE l.id = e.job_id OFFSET 0)
     AND NOT EXISTS (SELECT FROM {q}.journal n
                      WHERE n.job_id = e.job_id AND n.id > e.id AND n.outcome IN (0, 3, 7, 8) OFFSET 0)),
doomed AS MATERIALIZED (
  SELECT j.id FROM ended e CROSS JOIN LATERAL (
    SELECT b.id FROM {q}.jobs b WHERE b.id = e.job_id LIMIT 1 FOR UPDATE SKIP LOCKED) j
    LEFT JOIN LATERAL (
      SELECT true AS held FROM {q}.dead d WHERE e.outcome = 3 AND d.id = e.job_id LIMIT 1
         FOR UPDATE SKIP LOCKED) g ON true
   WHERE e.outcome <> 3 OR g.held
   LIMIT %s),
bodies AS (DELETE FROM {q}.jobs b WHERE b.id = ANY (ARRAY(SELECT id FROM doomed)) RETURNING 1),
entries AS (DELETE FROM {q}.journal e WHERE e.job_id = ANY (ARRAY(SELECT id FROM doomed))),
graves AS (DELETE FROM {q}.dead d WHERE d.id = ANY (ARRAY(SELECT id FROM doomed)))
SELECT count(*) FROM bodies"""
