-- Budgets: tallies of tenants, and reservations of unfinished runs. Written at once, never pending.

-- name: read_budgets
-- Answers (name, window, start, generation, used, held) of a tenant's budgets.
SELECT name, window, start, generation, used, held FROM budgets WHERE tenant = :tenant

-- name: read_budget
-- Answers (window, start, generation, used, held) of one budget.
SELECT window, start, generation, used, held FROM budgets WHERE tenant = :tenant AND name = :name

-- name: put_budget
-- Replaces the tally of a budget.
INSERT INTO budgets (tenant, name, window, start, generation, used, held)
VALUES (:tenant, :name, :window, :start, :generation, :used, :held)
ON CONFLICT (tenant, name) DO UPDATE SET
    window = excluded.window, start = excluded.start, generation = excluded.generation,
    used = excluded.used, held = excluded.held

-- name: read_reservations
-- Answers (name, generation, reserved, used) of an unfinished run.
SELECT name, generation, reserved, used FROM reservations WHERE run = :run

-- name: put_reservation
-- Replaces the reservation of a run.
INSERT INTO reservations (run, name, generation, reserved, used)
VALUES (:run, :name, :generation, :reserved, :used)
ON CONFLICT (run, name) DO UPDATE SET used = excluded.used

-- name: delete_reservations
-- Removes the reservations of a run that has ended.
DELETE FROM reservations WHERE run = :run

-- name: read_usage
-- Answers (job, run, tenant, usage) of a job.
SELECT job, run, tenant, usage FROM jobs
WHERE (tail, head) = (substr(:job_id, 3), substr(:job_id, 1, 2))

-- name: put_usage
-- Replaces what a job has reported as used under its fence.
UPDATE jobs SET usage = :usage WHERE job = :job
