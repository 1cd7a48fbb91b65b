-- Runs as they are, and the commit.

-- name: load_run
-- Answers the run's row and its origin.
SELECT
    runs.run, runs.id, runs.tenant, runs.workflow_id, runs.workflow_version, runs.created_at,
    runs.holds_slot, runs.status, runs.finished_at, runs.version, runs.nonce, runs.fence,
    runs.error, runs.output, origins.origin
FROM runs JOIN origins ON origins.run = runs.run
WHERE (runs.tail, runs.head) = (substr(:run_id, 3), substr(:run_id, 1, 2))

-- name: read_stamp
-- Answers (run, tenant, holds_slot, ended_at, version, nonce, fence): what a commit is held to.
SELECT run, tenant, holds_slot, ended_at, version, nonce, fence FROM runs
WHERE (tail, head) = (substr(:run_id, 3), substr(:run_id, 1, 2))

-- name: update_run
-- The part of a commit that is in the row of the run itself.
UPDATE runs SET
    status = :status, finished_at = :finished_at, ended_at = :ended_at, version = :version,
    nonce = :nonce, fence = :fence, error = :error, output = :output
WHERE run = :run

-- name: free_slot
-- One slot fewer in use.
UPDATE accounts SET active = max(0, active - 1) WHERE tenant = :tenant

-- name: active_runs
-- Answers (active).
SELECT active FROM accounts WHERE tenant = :tenant
