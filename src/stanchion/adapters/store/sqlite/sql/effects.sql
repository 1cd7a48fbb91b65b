-- The effects of a transition: jobs, timers and approvals.

-- name: dispatch_job
-- Makes a job ready, see together.sql.
INSERT INTO dispatches (
    id, run, tenant, topic, step_id, item, attempt, dispatch, max_deliveries, attempt_timeout_ms,
    trace, ticket, input
) VALUES (
    :id, :run, :tenant, :topic, :step_id, :item, :attempt, :dispatch, :max_deliveries,
    :attempt_timeout_ms, :trace, :ticket,
    :input
)

-- name: stop_run
-- Removes the approvals and timers of a run and revokes its jobs, see together.sql.
INSERT INTO stops (run) VALUES (:run)

-- name: open_jobs_of_step
-- Answers (job, topic, tenant, state) of the ready and leased jobs of one step, its items and the
-- steps inside it, whose ids continue with a dot; the slash follows the dot in the order of
-- characters.
SELECT job, topic, tenant, state FROM jobs
WHERE run = :run AND state IN ('ready', 'leased')
    AND (step_id = :step_id OR (step_id > :step_id || '.' AND step_id < :step_id || '/'))

-- name: open_job
-- Like open_jobs_of_step, one job.
SELECT job, topic, tenant, state FROM jobs
WHERE id = :id AND run = :run AND state IN ('ready', 'leased')

-- name: revoke_job
-- Revokes a job. Its fence is kept, but accepts no result.
UPDATE jobs SET
    state = 'revoked', ticket = NULL, worker_id = NULL, expires_at = NULL, progress = NULL
WHERE job = :job

-- name: revoke_jobs
-- Like revoke_job, for the jobs in :jobs, a JSON array.
UPDATE jobs SET
    state = 'revoked', ticket = NULL, worker_id = NULL, expires_at = NULL, progress = NULL
WHERE job IN (SELECT value FROM json_each(:jobs))

-- name: set_timer
-- Sets a timer, or replaces it; removes it if `due` is NULL. See together.sql.
INSERT INTO settings_of_timers (run, tenant, step_id, key, due, timer)
VALUES (:run, :tenant, :step_id, :key, :due, :timer)

-- name: clear_timers_of_step
-- Removes the timers of a step, of its items and of the steps inside it.
DELETE FROM timers WHERE run = :run
    AND (step_id = :step_id OR (step_id > :step_id || '.' AND step_id < :step_id || '/'))

-- name: open_approval
-- Adds an approval that waits for a decision.
INSERT INTO approvals (run, step_id, tenant, since, run_id, body)
VALUES (:run, :step_id, :tenant, :since, :run_id, :body)
ON CONFLICT (run, step_id) DO UPDATE SET since = excluded.since, body = excluded.body

-- name: close_approval
-- Removes the approval of a step.
DELETE FROM approvals WHERE run = :run AND step_id = :step_id

-- name: close_approvals_of_step
-- Removes the approvals of a step and of the steps inside it.
DELETE FROM approvals WHERE run = :run
    AND (step_id = :step_id OR (step_id > :step_id || '.' AND step_id < :step_id || '/'))
