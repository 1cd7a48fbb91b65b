-- Lists of runs, newest first: (id, tenant, workflow_id, workflow_version, status, created_at,
-- finished_at, error, risk, labels, rerun_of), from the first one before (:created_at, :run_id) to
-- :since. An index picks at most :limit rows; the last three are NULL for a run without marks.

-- name: part before
created_at >= :since AND (created_at, id) < (:created_at, :run_id)

-- name: part newest
ORDER BY created_at DESC, id DESC LIMIT :limit

-- name: part runs_of_picked
SELECT
    runs.id, runs.tenant, runs.workflow_id, runs.workflow_version, runs.status, runs.created_at,
    runs.finished_at, runs.error, marks.risk, marks.labels, marks.rerun_of
FROM picked CROSS JOIN runs ON runs.run = picked.run LEFT JOIN marks ON marks.run = picked.run

-- name: list_runs
-- Those of a tenant with one of eight statuses; a status may be NULL.
WITH picked AS (
    SELECT run, created_at, id FROM runs WHERE tenant = :tenant AND status = :s1 AND <part before>
    UNION ALL SELECT run, created_at, id FROM runs WHERE tenant = :tenant AND status = :s2 AND <part before>
    UNION ALL SELECT run, created_at, id FROM runs WHERE tenant = :tenant AND status = :s3 AND <part before>
    UNION ALL SELECT run, created_at, id FROM runs WHERE tenant = :tenant AND status = :s4 AND <part before>
    UNION ALL SELECT run, created_at, id FROM runs WHERE tenant = :tenant AND status = :s5 AND <part before>
    UNION ALL SELECT run, created_at, id FROM runs WHERE tenant = :tenant AND status = :s6 AND <part before>
    UNION ALL SELECT run, created_at, id FROM runs WHERE tenant = :tenant AND status = :s7 AND <part before>
    UNION ALL SELECT run, created_at, id FROM runs WHERE tenant = :tenant AND status = :s8 AND <part before>
    <part newest>
)
<part runs_of_picked>

-- name: list_runs_of_all
-- Like list_runs, of all tenants.
WITH picked AS (
    SELECT run, created_at, id FROM runs WHERE status = :s1 AND <part before>
    UNION ALL SELECT run, created_at, id FROM runs WHERE status = :s2 AND <part before>
    UNION ALL SELECT run, created_at, id FROM runs WHERE status = :s3 AND <part before>
    UNION ALL SELECT run, created_at, id FROM runs WHERE status = :s4 AND <part before>
    UNION ALL SELECT run, created_at, id FROM runs WHERE status = :s5 AND <part before>
    UNION ALL SELECT run, created_at, id FROM runs WHERE status = :s6 AND <part before>
    UNION ALL SELECT run, created_at, id FROM runs WHERE status = :s7 AND <part before>
    UNION ALL SELECT run, created_at, id FROM runs WHERE status = :s8 AND <part before>
    <part newest>
)
<part runs_of_picked>

-- name: list_runs_of_workflow
-- Those of one workflow of a tenant.
WITH picked AS (
    SELECT run, created_at, id FROM runs
    WHERE tenant = :tenant AND workflow_id = :workflow_id AND <part before> <part newest>
)
<part runs_of_picked>

-- name: list_runs_with_label
-- Those of a tenant with a label.
WITH picked AS (
    SELECT run, created_at, id FROM labels
    WHERE tenant = :tenant AND label = :label AND <part before> <part newest>
)
<part runs_of_picked>

-- name: list_runs_with_label_of_all
-- Like list_runs_with_label, of all tenants.
WITH picked AS (
    SELECT run, created_at, id FROM labels
    WHERE label = :label AND <part before> <part newest>
)
<part runs_of_picked>

-- name: list_reruns
-- The reruns of a run.
WITH picked AS (
    SELECT run, created_at, id FROM marks
    WHERE rerun_of = :rerun_of AND <part before> <part newest>
)
<part runs_of_picked>

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
