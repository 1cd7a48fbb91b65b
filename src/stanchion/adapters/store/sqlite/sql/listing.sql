-- Lists of a tenant's runs, newest first: (id, workflow_id, workflow_version, status, created_at,
-- finished_at, error), from the first one before (:created_at, :run_id).

-- name: list_runs
-- All of them.
SELECT id, workflow_id, workflow_version, status, created_at, finished_at, error FROM runs
WHERE tenant = :tenant AND (created_at, id) < (:created_at, :run_id)
ORDER BY created_at DESC, id DESC LIMIT :limit

-- name: list_runs_by_status
-- Those with one status.
SELECT id, workflow_id, workflow_version, status, created_at, finished_at, error FROM runs
WHERE tenant = :tenant AND status = :status AND (created_at, id) < (:created_at, :run_id)
ORDER BY created_at DESC, id DESC LIMIT :limit

-- name: list_approvals
-- Answers (body) of approvals after a position, oldest first.
SELECT body FROM approvals
WHERE (since, run_id, step_id) > (:since, :run_id, :step_id)
ORDER BY since, run_id, step_id LIMIT :limit

-- name: list_approvals_of_tenant
-- Like list_approvals, of one tenant.
SELECT body FROM approvals
WHERE tenant = :tenant AND (since, run_id, step_id) > (:since, :run_id, :step_id)
ORDER BY since, run_id, step_id LIMIT :limit
