-- How long an attempt may take from its first lease on, and when that is over, once it was leased.
ALTER TABLE jobs ADD COLUMN attempt_timeout_ms INTEGER;
ALTER TABLE jobs ADD COLUMN attempt_ends_at INTEGER;

CREATE INDEX jobs_by_attempt_end ON jobs (attempt_ends_at)
WHERE state IN ('ready', 'leased') AND attempt_ends_at IS NOT NULL;
