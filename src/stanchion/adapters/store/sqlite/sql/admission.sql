-- The gate: what bears on admission, and a run's first rows.

-- name: read_facts
-- Answers (exists, config, active, rate_used_until_ms, current, next): whether the run is there
-- already, which means that the same request was executed before; what is known of its tenant,
-- NULL where nothing is; how many of :definitions, a JSON object of workflow ids and versions, are
-- the newest; and what a new run's number is.
SELECT
    EXISTS (
        SELECT 1 FROM runs WHERE (tail, head) = (substr(:run_id, 3), substr(:run_id, 1, 2))
    ),
    (SELECT config FROM tenants WHERE tenant = :tenant),
    (SELECT active FROM accounts WHERE tenant = :tenant),
    (SELECT rate_used_until_ms FROM accounts WHERE tenant = :tenant),
    (
        -- Crossed, so that each that is wanted is looked up, and not all that the tenant has.
        SELECT count(*) FROM json_each(:definitions) CROSS JOIN newest_workflows AS newest
        WHERE newest.tenant = :tenant AND newest.workflow_id = json_each.key
            AND newest.version = json_each.value
    ),
    1 + coalesce((SELECT max(run) FROM runs), 0)

-- name: read_key
-- Answers (fingerprint, run_id, ended_at): what a key stands for, and when that run ended.
SELECT keys.fingerprint, runs.id, runs.ended_at
FROM keys JOIN runs ON runs.run = keys.run
WHERE keys.tenant = :tenant AND keys.key = :key

-- name: begin_run
-- Makes the run, see together.sql.
INSERT INTO beginnings (
    run, id, tenant, workflow_id, workflow_version, created_at, holds_slot, key, fingerprint,
    status, finished_at, ended_at, version, nonce, fence, error, output, origin, steps, entries
) VALUES (
    :run, :id, :tenant, :workflow_id, :workflow_version, :created_at, :holds_slot, :key,
    :fingerprint, :status, :finished_at, :ended_at, :version, :nonce, :fence, :error, :output,
    :origin, :steps, :entries
)

-- name: use_rate
-- The tenant has used its job rate up to then.
INSERT INTO accounts (tenant, rate_used_until_ms) VALUES (:tenant, :used_until_ms)
ON CONFLICT (tenant) DO UPDATE SET rate_used_until_ms = excluded.rate_used_until_ms
