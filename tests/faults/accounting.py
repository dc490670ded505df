"""What must hold of a queue whatever was done to it: every job is accounted for, and nothing is left behind."""

from __future__ import annotations

import collections
import collections.abc as cabc
import time
import uuid

import psycopg
from psycopg import sql

__all__ = ["accounted"]

RUNS = "e.worker IS NOT NULL"
"""What tells a run's entry from those of other events."""

_CHECKS = (
    # Every job that was enqueued is there, and has ended as expected.
    """SELECT format('job %%s was enqueued and is unknown', g.id) FROM unnest(%(ids)s::uuid[]) g(id)
        WHERE NOT EXISTS (SELECT FROM {q}.jobs j WHERE j.id = g.id)""",
    """SELECT format('job %%s is %%s, with payload %%s', j.id, j.status, j.payload) FROM {q}.all_jobs j
        WHERE j.status <> ALL (%(statuses)s::text[])""",
    # No claim is left, and no part of a job without the others.
    "SELECT format('job %%s is claimed by %%s', l.id, l.owner) FROM {q}.live l WHERE l.owner IS NOT NULL",
    """SELECT format('%%s %%s has no body', p.part, p.id)
         FROM (SELECT 'live', id FROM {q}.live UNION ALL SELECT 'dead', id FROM {q}.dead
               UNION ALL SELECT 'entry', job_id FROM {q}.journal) p(part, id)
        WHERE NOT EXISTS (SELECT FROM {q}.jobs j WHERE j.id = p.id)""",
    "SELECT format('job %%s is both live and dead', l.id) FROM {q}.live l JOIN {q}.dead d ON d.id = l.id",
    # The journal has one entry for each run, and one end for each life.
    """SELECT format('job %%s, %%s after %%s runs: the journal has the runs %%s', j.id, j.status, j.run_count, e.runs)
         FROM {q}.all_jobs j
        CROSS JOIN LATERAL (SELECT coalesce(array_agg(e.run_no ORDER BY e.run_no), '{{}}') AS runs
                              FROM {q}.journal e WHERE e.job_id = j.id AND """ + RUNS + """) e
        WHERE e.runs IS DISTINCT FROM ARRAY(SELECT generate_series(1, j.run_count))""",
    """SELECT format('job %%s is %%s: the journal ends it %%s times', j.id, j.status, e.ends)
         FROM {q}.all_jobs j
        CROSS JOIN LATERAL (SELECT count(*) FILTER (WHERE e.outcome IN (0, 3, 7)) AS ends,
                                   count(*) FILTER (WHERE e.outcome = 8) AS requeued
                              FROM {q}.journal e WHERE e.job_id = j.id) e
        WHERE e.ends <> e.requeued + (j.status IN ('completed', 'dead', 'cancelled'))::int""",
    """SELECT format('job %%s has %%s failures, the journal has %%s', j.id, j.failure_count, e.failures)
         FROM {q}.all_jobs j
        CROSS JOIN LATERAL (SELECT count(*) FILTER (WHERE e.outcome IN (2, 3, 4)) AS failures,
                                   count(*) FILTER (WHERE e.outcome IN (6, 8)) AS resets
                              FROM {q}.journal e WHERE e.job_id = j.id) e
        WHERE e.failures <> j.failure_count AND e.resets = 0""",
    # What a handler began is a run of the journal, begun once; what the journal calls completed has come to its end.
    """SELECT format('run %%s of job %%s was begun %%s times', f.run, f.job, count(*))
         FROM unnest(%(begun)s::uuid[], %(begun_runs)s::bigint[]) f(job, run)
        GROUP BY f.job, f.run HAVING count(*) > 1""",
    """SELECT format('run %%s of job %%s is not in the journal', f.run, f.job)
         FROM unnest(%(begun)s::uuid[], %(begun_runs)s::bigint[]) f(job, run)
        WHERE NOT EXISTS (SELECT FROM {q}.journal e WHERE e.job_id = f.job AND e.run_no = f.run AND """ + RUNS + ")",
    """SELECT format('run %%s of job %%s is completed, but its handler never ended', e.run_no, e.job_id)
         FROM {q}.journal e
        WHERE e.outcome = 0 AND %(watched)s
          AND NOT EXISTS (SELECT FROM unnest(%(ended)s::uuid[], %(ended_runs)s::bigint[]) f(job, run)
                           WHERE f.job = e.job_id AND f.run = e.run_no)""",
    # Nothing is left on the server.
    """SELECT format('advisory lock %%s/%%s of process %%s', l.classid, l.objid, l.pid) FROM pg_locks l
         JOIN pg_database d ON d.oid = l.database WHERE l.locktype = 'advisory' AND d.datname = current_database()""",
    """SELECT format('session %%s (%%s, %%s): %%s', a.pid, a.application_name, a.state, left(a.query, 100))
         FROM pg_stat_activity a
        WHERE a.datname = current_database()
          AND a.application_name ~ '^venturi (coordinator|maintainer|listener|worker)'""",
    "SELECT format('prepared transaction %%s', p.gid) FROM pg_prepared_xacts p WHERE p.database = current_database()",
)  # fmt: skip


def accounted(
    dsn: str,
    schema: str,
    ids: cabc.Iterable[uuid.UUID] = (),
    *,
    statuses: cabc.Sequence[str] = ("completed",),
    effects: cabc.Iterable[tuple[str, uuid.UUID, int, int, float]] | None = None,
    grace: float = 5.0,
) -> collections.Counter[str]:
    """Make sure that everything is accounted for once all workers have stopped.

    Args:
        ids: Jobs that were enqueued.
        statuses: How jobs may have ended.
        effects: What handlers wrote down, when every run of the queue did. Default: None, they wrote nothing down.
        grace: Seconds in which sessions may come to their end.

    Returns:
        How often each outcome is in the journal.
    """
    __tracebackhide__ = True
    seen = list(effects or ())
    begun, ended = ([line for line in seen if line[0] == what] for what in ("start", "end"))
    parameters: dict[str, object] = {
        "ids": list(ids),
        "statuses": list(statuses),
        "begun": [line[1] for line in begun],
        "begun_runs": [line[2] for line in begun],
        "ended": [line[1] for line in ended],
        "ended_runs": [line[2] for line in ended],
        "watched": effects is not None,
    }
    deadline = time.monotonic() + grace
    with psycopg.connect(dsn, autocommit=True, application_name="accounting") as connection:
        while (wrong := _wrong(connection, schema, parameters)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not wrong, "not accounted for:\n  " + "\n  ".join(wrong[:40])
        outcomes = sql.SQL("SELECT outcome, count(*) FROM {q}.all_entries GROUP BY outcome")
        return collections.Counter(dict(connection.execute(outcomes.format(q=sql.Identifier(schema))).fetchall()))


def _wrong(connection: psycopg.Connection, schema: str, parameters: dict[str, object]) -> list[str]:
    found: list[str] = []
    for check in _CHECKS:
        found += [row[0] for row in connection.execute(sql.SQL(check).format(q=sql.Identifier(schema)), parameters)]
    return found
