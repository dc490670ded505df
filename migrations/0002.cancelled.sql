-- Serves: the list of cancelled jobs, which are few among all that have finished. It holds nothing else, so that no other
-- entry pays for it.
CREATE INDEX journal_cancelled ON {schema}.journal (job_id) WHERE outcome = 7;

INSERT INTO {schema}.versions (version, oldest_library) VALUES (2, 1);
