-- Admission: its facts, and the first rows of a run.

-- name: read_facts
-- Answers (exists, config, active, queued, rate_used_until_ms, current, next): whether the run exists, so
-- that the same request was executed before; the stored data of its tenant, or NULL; how many of
-- :definitions, a JSON object of workflow names and versions, are in force; and the number of a new
-- run.
SELECT
    EXISTS (
        SELECT 1 FROM runs WHERE (tail, head) = (substr(:run_id, 3), substr(:run_id, 1, 2))
    ),
    <part facts>

-- name: part facts
-- What is judged, apart from run and key.
    (SELECT config FROM tenants WHERE tenant = :tenant),
    (SELECT active FROM accounts WHERE tenant = :tenant),
    (SELECT queued FROM accounts WHERE tenant = :tenant),
    (SELECT rate_used_until_ms FROM accounts WHERE tenant = :tenant),
    (
        SELECT count(*) FROM json_each(:definitions)
        WHERE json_each.value = coalesce(
            CASE WHEN substr(json_each.key, 1, 7) = 'shared/' THEN coalesce(
                (
                    SELECT version FROM pins
                    WHERE tenant = :tenant AND workflow_id = substr(json_each.key, 8)
                ),
                (
                    SELECT version FROM newest_workflows
                    WHERE tenant = '*' AND workflow_id = substr(json_each.key, 8)
                )
            )
            ELSE (
                SELECT version FROM newest_workflows
                WHERE tenant = :tenant AND workflow_id = json_each.key
            ) END,
            0
        )
    ),
    1 + coalesce((SELECT max(run) FROM runs), 0)

-- name: read_batch_facts
-- Like read_facts, for :runs and :keys, JSON arrays. Answers (known, …, next_job, position): whether
-- one of the runs exists or one of the keys has a record; the number of a new job; and the next
-- position in the tenant's feed.
SELECT
    EXISTS (
        SELECT 1 FROM json_each(:runs) AS asked
        CROSS JOIN runs
            ON (runs.tail, runs.head) = (substr(asked.value, 3), substr(asked.value, 1, 2))
    ) OR EXISTS (
        SELECT 1 FROM json_each(:keys) AS asked
        CROSS JOIN keys ON keys.tenant = :tenant AND keys.key = asked.value
    ),
    <part facts>,
    1 + coalesce((SELECT max(job) FROM jobs), 0),
    1 + max(
        coalesce((SELECT max(position) FROM history WHERE tenant = :tenant), 0),
        coalesce((SELECT feed_end FROM accounts WHERE tenant = :tenant), 0)
    )

-- name: read_known_runs
-- Answers (id) of those of :runs, a JSON array, that exist.
SELECT runs.id
FROM json_each(:runs) AS asked
CROSS JOIN runs ON (runs.tail, runs.head) = (substr(asked.value, 3), substr(asked.value, 1, 2))

-- name: read_key
-- Answers (fingerprint, run_id, ended_at): the record of a key, and when its run ended.
SELECT keys.fingerprint, runs.id, runs.ended_at
FROM keys JOIN runs ON runs.run = keys.run
WHERE keys.tenant = :tenant AND keys.key = :key

-- name: read_keys
-- Answers (key, fingerprint, run_id, ended_at) of those of :keys, a JSON array, that have a record.
-- CROSS JOIN keeps the order of the tables: SQLite does not know how short the array is.
SELECT keys.key, keys.fingerprint, runs.id, runs.ended_at
FROM json_each(:keys) AS asked
CROSS JOIN keys ON keys.tenant = :tenant AND keys.key = asked.value
CROSS JOIN runs ON runs.run = keys.run

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

-- name: stage_row
-- Puts a job of a batch, with its run, into the table from which begin_batch writes it.
INSERT INTO staged (
    place, run, kind, id, key, fingerprint, origin, input
) VALUES (
    :place, :run, :kind, :id, :key, :fingerprint, :origin, :input
)

-- name: begin_batch
-- Creates the runs that are staged, see together.sql.
INSERT INTO batches (
    run, count, first, tenant, workflow_id, workflow_version, created_at, status, version, nonce,
    fence, entries, kinds, timers, job, ticket, position
) VALUES (
    :run, :count, :first, :tenant, :workflow_id, :workflow_version, :created_at, :status, :version,
    :nonce, :fence, :entries, :kinds, :timers, :job, :ticket, :position
)

-- name: begin_shared_run
-- Counts an unfinished run of a shared workflow.
INSERT INTO shared_runs (run, workflow_id, tenant) VALUES (:run, :workflow_id, :tenant)

-- name: mark_run
-- Writes what lists show of the run beside its row, see together.sql.
INSERT INTO markings (run, tenant, created_at, id, risk, labels, rerun_of, texts)
VALUES (:run, :tenant, :created_at, :id, :risk, :labels, :rerun_of, :texts)

-- name: read_tick
-- The mark of a schedule: generation and tick of its last run.
SELECT generation, tick FROM schedule_ticks WHERE tenant = :tenant AND schedule = :schedule

-- name: put_tick
-- Raises the mark of a schedule.
INSERT INTO schedule_ticks (tenant, schedule, generation, tick)
VALUES (:tenant, :schedule, :generation, :tick)
ON CONFLICT (tenant, schedule) DO UPDATE
SET generation = excluded.generation, tick = excluded.tick

-- name: use_rate
-- Stores up to when the tenant has used its job rate.
INSERT INTO accounts (tenant, rate_used_until_ms) VALUES (:tenant, :used_until_ms)
ON CONFLICT (tenant) DO UPDATE SET rate_used_until_ms = excluded.rate_used_until_ms
