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
