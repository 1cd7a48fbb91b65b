-- What a transition asks for besides steps and items: jobs and timers.

-- name: dispatch_job
-- Makes a job ready. One that is dead becomes ready again under its old fence; any other is left
-- alone. Answers (job) unless it was.
INSERT INTO jobs (id, run, tenant, topic, step_id, item, attempt, dispatch, state, ticket)
VALUES (:id, :run, :tenant, :topic, :step_id, :item, :attempt, :dispatch, 'ready', :ticket)
ON CONFLICT (tail, head) DO UPDATE SET
    topic = excluded.topic, attempt = excluded.attempt, dispatch = excluded.dispatch,
    state = 'ready', ticket = excluded.ticket, deliveries = 0, worker_id = NULL, expires_at = NULL
WHERE state = 'dead'
RETURNING job

-- name: put_job_input
-- What the worker gets. A dead job's replay may bring another.
INSERT INTO job_inputs (job, input) VALUES (:job, :input)
ON CONFLICT (job) DO UPDATE SET input = excluded.input

-- name: open_jobs_of_run
-- Answers (job, topic, tenant, state) of jobs that wait or are leased.
SELECT job, topic, tenant, state FROM jobs WHERE run = :run AND state IN ('ready', 'leased')

-- name: open_jobs_of_step
-- As open_jobs_of_run, of one step and its items.
SELECT job, topic, tenant, state FROM jobs
WHERE run = :run AND state IN ('ready', 'leased') AND step_id = :step_id

-- name: revoke_job
-- Takes a job from whoever has it or might get it. Its fence stays, and is worth nothing.
UPDATE jobs SET state = 'revoked', ticket = NULL, worker_id = NULL, expires_at = NULL
WHERE job = :job

-- name: set_timer
-- Sets a timer, or sets it anew.
INSERT INTO timers (run, step_id, key, due, timer) VALUES (:run, :step_id, :key, :due, :timer)
ON CONFLICT (run, step_id, key) DO UPDATE SET due = excluded.due

-- name: clear_timer
-- Forgets one timer.
DELETE FROM timers WHERE run = :run AND step_id = :step_id AND key = :key

-- name: clear_timers_of_step
-- Forgets a step's timers, and its items'.
DELETE FROM timers WHERE run = :run AND step_id = :step_id

-- name: clear_timers_of_run
-- Forgets all timers of a run.
DELETE FROM timers WHERE run = :run
