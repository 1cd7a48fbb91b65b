-- The gate: what bears on admission, and a run's first rows.

-- name: read_facts
-- Answers (exists, config, active, rate_used_until_ms), each but the first NULL if there is none.
-- A run that exists: the same request has been executed before.
SELECT
    EXISTS (
        SELECT 1 FROM runs WHERE (tail, head) = (substr(:run_id, 3), substr(:run_id, 1, 2))
    ),
    (SELECT config FROM tenants WHERE tenant = :tenant),
    (SELECT active FROM accounts WHERE tenant = :tenant),
    (SELECT rate_used_until_ms FROM accounts WHERE tenant = :tenant)

-- name: read_key
-- Answers (fingerprint, run_id, ended_at): what a key stands for, and when that run ended.
SELECT keys.fingerprint, runs.id, runs.ended_at
FROM keys JOIN runs ON runs.run = keys.run
WHERE keys.tenant = :tenant AND keys.key = :key

-- name: newest_version
-- Answers (version).
SELECT version FROM newest_workflows WHERE tenant = :tenant AND workflow_id = :workflow_id

-- name: insert_run
-- Answers (run): its number in this file.
INSERT INTO runs (
    id, tenant, workflow_id, workflow_version, created_at, holds_slot, key, status, finished_at,
    ended_at, version, nonce, fence, error, output
) VALUES (
    :id, :tenant, :workflow_id, :workflow_version, :created_at, :holds_slot, :key, :status,
    :finished_at, :ended_at, :version, :nonce, :fence, :error, :output
)
RETURNING run

-- name: insert_origin
-- What never changes about the run.
INSERT INTO origins (run, origin) VALUES (:run, :origin)

-- name: bind_key
-- The key stands for this run. One that has aged is taken over.
INSERT INTO keys (tenant, key, run, fingerprint) VALUES (:tenant, :key, :run, :fingerprint)
ON CONFLICT (tenant, key) DO UPDATE SET run = excluded.run, fingerprint = excluded.fingerprint

-- name: take_slot
-- One slot more in use. The account is opened with the first.
INSERT INTO accounts (tenant, active) VALUES (:tenant, 1)
ON CONFLICT (tenant) DO UPDATE SET active = active + 1

-- name: use_rate
-- The tenant has used its job rate up to then.
INSERT INTO accounts (tenant, rate_used_until_ms) VALUES (:tenant, :used_until_ms)
ON CONFLICT (tenant) DO UPDATE SET rate_used_until_ms = excluded.rate_used_until_ms
