-- Jobs and their leases, from the worker's side.

-- name: renew_job
-- Extends the lease if it has not expired. A NULL tenant means any, a NULL progress no change.
UPDATE jobs SET expires_at = :expires_at, progress = coalesce(:progress, progress)
WHERE (tail, head) = (substr(:job_id, 3), substr(:job_id, 1, 2))
    AND state = 'leased' AND fence = :fence AND expires_at > :now
    AND (:tenant IS NULL OR tenant = :tenant)

-- name: show_lease
-- Answers (state, status of the run, fence, expires_at) of a job. NULL for the tenant: of any.
SELECT jobs.state, runs.status, jobs.fence, jobs.expires_at
FROM jobs JOIN runs ON runs.run = jobs.run
WHERE (jobs.tail, jobs.head) = (substr(:job_id, 3), substr(:job_id, 1, 2))
    AND (:tenant IS NULL OR jobs.tenant = :tenant)

-- name: find_job
-- Answers (job, run, run_id, ended_at, step_id, item, state, fence).
SELECT jobs.job, runs.run, runs.id, runs.ended_at, jobs.step_id, jobs.item, jobs.state, jobs.fence
FROM jobs JOIN runs ON runs.run = jobs.run
WHERE (jobs.tail, jobs.head) = (substr(:job_id, 3), substr(:job_id, 1, 2))
    AND (:tenant IS NULL OR jobs.tenant = :tenant)

-- name: find_jobs
-- Answers (id, job, run, state, fence) of the jobs in :job_ids, a JSON array.
SELECT jobs.id, jobs.job, jobs.run, jobs.state, jobs.fence
FROM json_each(:job_ids)
CROSS JOIN jobs ON (jobs.tail, jobs.head) = (substr(value, 3), substr(value, 1, 2))

-- name: accept_result
-- Accepts a result, see together.sql.
INSERT INTO results (job, worker_id, run, ticket, entry_id, event, due)
VALUES (:job, :worker_id, :run, :ticket, :entry_id, :event, :due)

-- name: show_job
-- Answers the job's columns in the order of JobView, and its input.
SELECT
    jobs.id, runs.id, jobs.tenant, jobs.step_id, jobs.topic, jobs.attempt, jobs.item,
    jobs.dispatch, job_inputs.input, jobs.state, jobs.fence, jobs.deliveries, jobs.worker_id,
    jobs.expires_at, jobs.max_deliveries, jobs.attempt_timeout_ms, jobs.trace, jobs.progress
FROM jobs
JOIN runs ON runs.run = jobs.run
JOIN job_inputs ON job_inputs.job = jobs.job
WHERE (jobs.tail, jobs.head) = (substr(:job_id, 3), substr(:job_id, 1, 2))

-- name: show_progress
-- Answers (id, progress) of a job of this run that has any.
SELECT jobs.id, jobs.progress FROM jobs JOIN runs ON runs.run = jobs.run
WHERE (jobs.tail, jobs.head) = (substr(:job_id, 3), substr(:job_id, 1, 2))
    AND runs.id = :run_id AND jobs.progress IS NOT NULL

-- name: expired_jobs
-- Answers (expires_at, job, id, run, run_id, tenant, topic, deliveries, max_deliveries, state,
-- is_over) of expired leases, earliest first; is_over: whether the attempt has taken too long as well.
SELECT
    jobs.expires_at, jobs.job, jobs.id, runs.run, runs.id, jobs.tenant, jobs.topic, jobs.deliveries,
    jobs.max_deliveries, jobs.state, coalesce(jobs.attempt_ends_at <= :now, 0)
FROM jobs JOIN runs ON runs.run = jobs.run
WHERE jobs.state = 'leased' AND jobs.expires_at <= :now
ORDER BY jobs.expires_at LIMIT :limit

-- name: overdue_jobs
-- As expired_jobs, of jobs whose attempt has taken too long: leased, or ready again.
SELECT
    jobs.attempt_ends_at, jobs.job, jobs.id, runs.run, runs.id, jobs.tenant, jobs.topic,
    jobs.deliveries, jobs.max_deliveries, jobs.state, 1
FROM jobs JOIN runs ON runs.run = jobs.run
WHERE jobs.state IN ('ready', 'leased') AND jobs.attempt_ends_at <= :now
ORDER BY jobs.attempt_ends_at LIMIT :limit

-- name: offer_again
-- Puts a job whose lease expired at the tail of its queue.
UPDATE jobs SET state = 'ready', ticket = :ticket, worker_id = NULL, expires_at = NULL,
    progress = NULL
WHERE job = :job

-- name: mark_dead
-- Marks a job dead that was delivered as often as is allowed.
UPDATE jobs SET state = 'dead', worker_id = NULL, expires_at = NULL, progress = NULL
WHERE job = :job
