-- Admission: its facts, and the first rows of a run.

-- name: read_facts
-- Answers (exists, config, active, rate_used_until_ms, current, next): whether the run exists, so
-- that the same request was executed before; the stored data of its tenant, or NULL; how many of
-- :definitions, a JSON object of workflow ids and versions, are the newest; and the number of a new
-- run.
SELECT
    EXISTS (
        SELECT 1 FROM runs WHERE (tail, head) = (substr(:run_id, 3), substr(:run_id, 1, 2))
    ),
    (SELECT config FROM tenants WHERE tenant = :tenant),
    (SELECT active FROM accounts WHERE tenant = :tenant),
    (SELECT rate_used_until_ms FROM accounts WHERE tenant = :tenant),
    (
        -- CROSS JOIN: looks up each wanted workflow instead of scanning all of the tenant.
        SELECT count(*) FROM json_each(:definitions) CROSS JOIN newest_workflows AS newest
        WHERE newest.tenant = :tenant AND newest.workflow_id = json_each.key
            AND newest.version = json_each.value
    ),
    1 + coalesce((SELECT max(run) FROM runs), 0)

-- name: read_key
-- Answers (fingerprint, run_id, ended_at): the record of a key, and when its run ended.
SELECT keys.fingerprint, runs.id, runs.ended_at
FROM keys JOIN runs ON runs.run = keys.run
WHERE keys.tenant = :tenant AND keys.key = :key

-- name: begin_run
-- Creates the run, see together.sql.
INSERT INTO beginnings (
    run, id, tenant, workflow_id, workflow_version, created_at, holds_slot, key, fingerprint,
    status, finished_at, ended_at, version, nonce, fence, error, output, origin, steps, entries
) VALUES (
    :run, :id, :tenant, :workflow_id, :workflow_version, :created_at, :holds_slot, :key,
    :fingerprint, :status, :finished_at, :ended_at, :version, :nonce, :fence, :error, :output,
    :origin, :steps, :entries
)

-- name: use_rate
-- Stores up to when the tenant has used its job rate.
INSERT INTO accounts (tenant, rate_used_until_ms) VALUES (:tenant, :used_until_ms)
ON CONFLICT (tenant) DO UPDATE SET rate_used_until_ms = excluded.rate_used_until_ms
