-- The audit of slots, and the removal of old runs.

-- name: next_tenant
-- Answers (tenant): the first one after :after that has ever used a slot.
SELECT tenant FROM accounts WHERE tenant > :after ORDER BY tenant LIMIT 1

-- name: compare_slots
-- Answers (counted, actual): the count, and how many unfinished runs hold a slot.
SELECT
    (SELECT active FROM accounts WHERE tenant = :tenant),
    (
        SELECT count(*) FROM runs
        WHERE tenant = :tenant AND status IN ('pending', 'running', 'waiting') AND holds_slot = 1
    )

-- name: repair_slots
-- Sets the count to the number of unfinished runs that hold a slot.
UPDATE accounts SET active = :actual WHERE tenant = :tenant

-- name: old_runs
-- Answers (run, tenant, key) of runs that finished before :before, oldest first.
SELECT run, tenant, key FROM runs
WHERE ended_at IS NOT NULL AND coalesce(finished_at, ended_at) < :before
ORDER BY coalesce(finished_at, ended_at) LIMIT :limit

-- name: keep_feed_end
-- Keeps the end of the tenant's feed, so that no position is used twice.
INSERT INTO accounts (tenant, feed_end) VALUES (
    :tenant, coalesce((SELECT max(position) FROM history WHERE tenant = :tenant), 0)
)
ON CONFLICT (tenant) DO UPDATE SET feed_end = max(feed_end, excluded.feed_end)

-- name: purge_key
-- The run's key, unless it has expired and is bound to a later run.
DELETE FROM keys WHERE tenant = :tenant AND key = :key AND run = :run

-- name: jobs_to_purge
-- Answers (job) of some of the run's jobs.
SELECT job FROM jobs WHERE run = :run LIMIT :limit

-- name: purge_job_inputs
-- The inputs of the jobs in :jobs, a JSON array.
DELETE FROM job_inputs WHERE job IN (SELECT value FROM json_each(:jobs))

-- name: purge_jobs
-- The jobs in :jobs, a JSON array.
DELETE FROM jobs WHERE job IN (SELECT value FROM json_each(:jobs))

-- name: purge_history
-- The oldest rows of the run's timeline, which is its part of the feed.
DELETE FROM history WHERE tenant = :tenant AND position IN (
    SELECT position FROM history WHERE run = :run ORDER BY position LIMIT :limit
)

-- name: purge_items
-- The run's items.
DELETE FROM items WHERE run = :run

-- name: purge_item_blocks
-- The run's items that were written together.
DELETE FROM item_blocks WHERE run = :run

-- name: purge_steps
-- The run's steps.
DELETE FROM steps WHERE run = :run

-- name: purge_timers
-- The run's timers.
DELETE FROM timers WHERE run = :run

-- name: purge_inbox
-- The run's inbox.
DELETE FROM inbox WHERE run = :run

-- name: purge_outbox
-- The run's outbox row.
DELETE FROM outbox WHERE run = :run

-- name: purge_letters
-- The run's dead letters.
DELETE FROM dead_letters WHERE run = :run

-- name: purge_origin
-- The run's origin.
DELETE FROM origins WHERE run = :run

-- name: purge_labels
-- The run's labels.
DELETE FROM labels WHERE run = :run

-- name: purge_marks
-- What lists show of the run beside its row.
DELETE FROM marks WHERE run = :run

-- name: purge_run
-- The run itself; last, since the others are found by it.
DELETE FROM runs WHERE run = :run
