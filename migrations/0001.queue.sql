-- One queue is one schema. {schema} is replaced by its quoted name; nothing here depends on search_path.
--
-- jobs     the body of every job, written once; only a merge rewrites it
-- live     one narrow row per unfinished job: the hot table
-- journal  append-only, one row per run and per event; also the history of finished jobs
-- dead     what a requeue needs of jobs that gave up
-- workers  one row per worker, with its heartbeat
-- cancels  requests to stop claimed jobs, so that a request never locks a live row
--
-- No foreign keys: they would lock parents under load, and history outlives what it speaks of.

CREATE TABLE {schema}.jobs (
  id          uuid PRIMARY KEY,
  kind        text COLLATE "C" NOT NULL CHECK (octet_length(kind) BETWEEN 1 AND 200),
  payload     jsonb NOT NULL,
  priority    smallint NOT NULL CHECK (priority BETWEEN 0 AND 2),
  dedup_key   text COLLATE "C" CHECK (octet_length(dedup_key) <= 1000),
  created_at  timestamptz NOT NULL CHECK (isfinite(created_at)),
  trace       jsonb
);

-- Nothing that a claim or a renewal changes (owner, lease_until, run_count) is indexed, and half of each page is
-- left free, so that both are HOT updates. The autovacuum settings keep the table small: it is judged by the number
-- of dead rows alone, since its size says nothing.
CREATE TABLE {schema}.live (
  id             uuid PRIMARY KEY,
  visible_at     timestamptz NOT NULL CHECK (visible_at BETWEEN '2000-01-01 00:00 UTC' AND '9999-12-01 00:00 UTC'),
  lease_until    timestamptz CHECK (isfinite(lease_until)),
  owner          uuid,
  run_count      bigint NOT NULL DEFAULT 0 CHECK (run_count >= 0),
  failure_count  bigint NOT NULL DEFAULT 0 CHECK (failure_count >= 0),
  priority       smallint NOT NULL CHECK (priority BETWEEN 0 AND 2),
  kind           text COLLATE "C" NOT NULL CHECK (octet_length(kind) BETWEEN 1 AND 200),
  dedup_key      text COLLATE "C" CHECK (octet_length(dedup_key) <= 1000),
  carry          jsonb,
  CONSTRAINT live_claim CHECK ((owner IS NULL) = (lease_until IS NULL)),
  CONSTRAINT live_epoch CHECK (owner IS NULL OR run_count > 0)
) WITH (
  fillfactor = 50,
  autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000,
  autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 20000,
  autovacuum_vacuum_cost_delay = 0,
  autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 1000000
);

-- Serves: claim, next due, recovery, stats. The id is left out on purpose: as a trailing column it would be offered
-- for "id = ..." and read as a whole whenever the table is believed to be empty.
CREATE INDEX live_lane ON {schema}.live (kind, priority, visible_at);

-- Serves: the search for merge candidates. It mentions neither state nor owner, so that a claim stays HOT.
CREATE INDEX live_key ON {schema}.live (kind, dedup_key) WHERE dedup_key IS NOT NULL;

-- Outcomes: 0 completed, 1 paused, 2 retried, 3 dead, 4 recovered, 5 released, 6 merged, 7 cancelled, 8 requeued.
CREATE TABLE {schema}.journal (
  id             bigint GENERATED ALWAYS AS IDENTITY,
  job_id         uuid NOT NULL,
  run_no         bigint NOT NULL CHECK (run_no >= 0),
  failure_count  bigint NOT NULL CHECK (failure_count >= 0),
  recorded_at    timestamptz NOT NULL,
  outcome        smallint NOT NULL CHECK (outcome BETWEEN 0 AND 8),
  kind           text COLLATE "C" NOT NULL,
  worker         uuid,
  duration       interval,
  note           text,
  traceback      text,
  evidence       jsonb,
  PRIMARY KEY (job_id, id)
) WITH (autovacuum_vacuum_insert_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.05);

-- Serves: cleanup, oldest finished first. Only the entries that end a job are in it.
CREATE INDEX journal_finished ON {schema}.journal (recorded_at) WHERE outcome IN (0, 3, 7);

CREATE TABLE {schema}.dead (
  id             uuid PRIMARY KEY,
  kind           text COLLATE "C" NOT NULL,
  died_at        timestamptz NOT NULL,
  run_count      bigint NOT NULL,
  failure_count  bigint NOT NULL,
  carry          jsonb
);

-- Serves: requeue_many, longest dead first.
CREATE INDEX dead_died ON {schema}.dead (died_at);

CREATE TABLE {schema}.workers (
  id          uuid PRIMARY KEY,
  host        text NOT NULL,
  pid         bigint NOT NULL,
  slots       int NOT NULL CHECK (slots > 0),
  kinds       text[] NOT NULL,
  lease       interval NOT NULL,
  started_at  timestamptz NOT NULL,
  seen_at     timestamptz NOT NULL
) WITH (fillfactor = 20, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);

CREATE TABLE {schema}.cancels (
  job_id        uuid NOT NULL,
  run_count     bigint NOT NULL,
  requested_at  timestamptz NOT NULL,
  PRIMARY KEY (job_id, run_count)
);

-- Which library versions may work on this schema; each migration adds a row.
CREATE TABLE {schema}.versions (
  version         int PRIMARY KEY CHECK (version > 0),
  oldest_library  int NOT NULL CHECK (oldest_library > 0),
  applied_at      timestamptz NOT NULL DEFAULT now()
);
COMMENT ON TABLE {schema}.versions IS 'One row per schema version; oldest_library is the oldest version that a library may have been made for and still work here.';
INSERT INTO {schema}.versions (version, oldest_library) VALUES (1, 1);

-- The published interface: tables may change, these views stay.

CREATE VIEW {schema}.all_jobs AS
SELECT j.id, j.kind,
       CASE WHEN l.owner IS NOT NULL THEN 'claimed'
            WHEN l.id IS NOT NULL THEN 'pending'
            WHEN d.id IS NOT NULL THEN 'dead'
            WHEN e.outcome = 7 THEN 'cancelled'
            ELSE 'completed' END AS status,
       coalesce(l.priority, j.priority) AS priority,
       coalesce(l.run_count, d.run_count, e.run_no, 0) AS run_count,
       coalesce(l.failure_count, d.failure_count, e.failure_count, 0) AS failure_count,
       j.dedup_key, j.created_at, l.visible_at, l.owner, l.lease_until,
       coalesce(d.died_at, e.recorded_at) AS finished_at,
       j.payload, coalesce(l.carry, d.carry) AS carry
  FROM {schema}.jobs j
  LEFT JOIN {schema}.live l ON l.id = j.id
  LEFT JOIN {schema}.dead d ON d.id = j.id
  LEFT JOIN LATERAL (SELECT n.outcome, n.run_no, n.failure_count, n.recorded_at
                       FROM {schema}.journal n
                      WHERE n.job_id = j.id AND l.id IS NULL
                      ORDER BY n.id DESC LIMIT 1) e ON true;

CREATE VIEW {schema}.all_entries AS
SELECT n.id, n.job_id, n.kind, n.run_no, n.failure_count,
       (ARRAY['completed', 'paused', 'retried', 'dead', 'recovered', 'released', 'merged', 'cancelled', 'requeued'])
         [n.outcome + 1] AS outcome,
       n.recorded_at, n.duration, n.worker, n.note, n.traceback, n.evidence
  FROM {schema}.journal n;

CREATE VIEW {schema}.all_workers AS
SELECT w.id, w.host, w.pid, w.slots, w.kinds, w.lease, w.started_at, w.seen_at,
       w.seen_at > statement_timestamp() - w.lease AS live
  FROM {schema}.workers w;

COMMENT ON VIEW {schema}.all_jobs IS 'Every job with its status: pending, claimed, completed, dead or cancelled.';
COMMENT ON COLUMN {schema}.all_jobs.id IS 'UUIDv7: sorts by the time of the enqueue.';
COMMENT ON COLUMN {schema}.all_jobs.kind IS 'The stable name of the task type.';
COMMENT ON COLUMN {schema}.all_jobs.status IS 'pending, claimed, completed, dead or cancelled.';
COMMENT ON COLUMN {schema}.all_jobs.priority IS '0 high, 1 normal, 2 low.';
COMMENT ON COLUMN {schema}.all_jobs.run_count IS 'Runs started so far.';
COMMENT ON COLUMN {schema}.all_jobs.failure_count IS 'Failed runs since the enqueue, or since the last requeue or replacing merge.';
COMMENT ON COLUMN {schema}.all_jobs.dedup_key IS 'Jobs of one kind with equal keys merge while pending.';
COMMENT ON COLUMN {schema}.all_jobs.created_at IS 'When it was enqueued.';
COMMENT ON COLUMN {schema}.all_jobs.visible_at IS 'When it is due; null once finished.';
COMMENT ON COLUMN {schema}.all_jobs.owner IS 'The worker that holds the claim.';
COMMENT ON COLUMN {schema}.all_jobs.lease_until IS 'When the claim ends unless renewed.';
COMMENT ON COLUMN {schema}.all_jobs.finished_at IS 'When it completed, died or was cancelled.';
COMMENT ON COLUMN {schema}.all_jobs.payload IS 'The stored task.';
COMMENT ON COLUMN {schema}.all_jobs.carry IS 'The state kept between runs; null when never set.';
COMMENT ON VIEW {schema}.all_entries IS 'The journal: one row per run and per event, oldest first by id.';
COMMENT ON COLUMN {schema}.all_entries.id IS 'Rises with every entry.';
COMMENT ON COLUMN {schema}.all_entries.job_id IS 'The job it belongs to.';
COMMENT ON COLUMN {schema}.all_entries.kind IS 'The kind of that job.';
COMMENT ON COLUMN {schema}.all_entries.run_no IS 'The run it belongs to; 0 when the job never ran.';
COMMENT ON COLUMN {schema}.all_entries.failure_count IS 'Failures of the job after this entry.';
COMMENT ON COLUMN {schema}.all_entries.outcome IS 'completed, paused, retried, dead, recovered, released, merged, cancelled or requeued.';
COMMENT ON COLUMN {schema}.all_entries.recorded_at IS 'When it was recorded.';
COMMENT ON COLUMN {schema}.all_entries.duration IS 'How long the handler ran; null for what is no run.';
COMMENT ON COLUMN {schema}.all_entries.worker IS 'The worker that ran it.';
COMMENT ON COLUMN {schema}.all_entries.note IS 'One line: the outcome''s note or the error.';
COMMENT ON COLUMN {schema}.all_entries.traceback IS 'The last 16 KiB of a failure''s traceback.';
COMMENT ON COLUMN {schema}.all_entries.evidence IS 'What the handler attached; for a merge, old and new priority and time.';
COMMENT ON VIEW {schema}.all_workers IS 'Every worker that has not been silent for ten leases.';
COMMENT ON COLUMN {schema}.all_workers.id IS 'The random identity of one worker; the owner of its claims.';
COMMENT ON COLUMN {schema}.all_workers.host IS 'The machine it runs on.';
COMMENT ON COLUMN {schema}.all_workers.pid IS 'Its process there.';
COMMENT ON COLUMN {schema}.all_workers.slots IS 'How many handlers it runs at once.';
COMMENT ON COLUMN {schema}.all_workers.kinds IS 'The kinds that it claims.';
COMMENT ON COLUMN {schema}.all_workers.lease IS 'How long its claims last without a renewal.';
COMMENT ON COLUMN {schema}.all_workers.started_at IS 'When it started.';
COMMENT ON COLUMN {schema}.all_workers.seen_at IS 'Its last heartbeat.';
COMMENT ON COLUMN {schema}.all_workers.live IS 'Whether that was less than one lease ago.';
