-- The queue of a tenant: the runs that wait for a slot, and the ring of their fairness keys.

-- name: enqueue_run
-- Adds a run at the tail of its key.
INSERT INTO waiting (run, tenant, priority, fairness_key, ticket)
VALUES (:run, :tenant, :priority, :fairness_key, :ticket)

-- name: join_ring
-- Adds a key at the tail of the ring, unless it is there.
INSERT INTO fairness_keys (tenant, priority, fairness_key, turn)
VALUES (:tenant, :priority, :fairness_key, :ticket)
ON CONFLICT (tenant, priority, fairness_key) DO NOTHING

-- name: count_queued
-- Changes the count of waiting runs.
INSERT INTO accounts (tenant, queued) VALUES (:tenant, :change)
ON CONFLICT (tenant) DO UPDATE SET queued = queued + excluded.queued

-- name: free_slots
-- Answers (config, active, queued) of a tenant with waiting runs.
SELECT (SELECT config FROM tenants WHERE tenants.tenant = accounts.tenant), active, queued
FROM accounts WHERE tenant = :tenant AND queued > 0

-- name: next_waiting
-- Answers (run, id, priority, fairness_key) of the run that gets the next slot.
SELECT waiting.run, runs.id, waiting.priority, waiting.fairness_key
FROM waiting JOIN runs ON runs.run = waiting.run
WHERE (waiting.tenant, waiting.priority, waiting.fairness_key) = (
    SELECT tenant, priority, fairness_key FROM fairness_keys
    WHERE tenant = :tenant ORDER BY priority DESC, turn LIMIT 1
)
ORDER BY waiting.ticket LIMIT 1

-- name: find_waiting
-- Answers (priority, fairness_key) of a run that waits.
SELECT priority, fairness_key FROM waiting WHERE run = :run

-- name: leave_waiting
-- Removes a run from the queue.
DELETE FROM waiting WHERE run = :run

-- name: leave_ring
-- Removes a key without waiting runs from the ring.
DELETE FROM fairness_keys
WHERE tenant = :tenant AND priority = :priority AND fairness_key = :fairness_key
    AND NOT EXISTS (
        SELECT 1 FROM waiting
        WHERE waiting.tenant = :tenant AND waiting.priority = :priority
            AND waiting.fairness_key = :fairness_key
    )

-- name: pass_turn
-- Moves a key to the tail of the ring.
UPDATE fairness_keys SET turn = :ticket
WHERE tenant = :tenant AND priority = :priority AND fairness_key = :fairness_key

-- name: promote_run
-- Gives a waiting run a slot. The new stamp depends on the old one alone.
UPDATE runs SET status = 'pending', version = version + 1, nonce = '+' || nonce WHERE run = :run

-- name: take_slot
-- Counts one slot more.
UPDATE accounts SET active = active + 1 WHERE tenant = :tenant

-- name: queued_runs
-- Answers (queued).
SELECT queued FROM accounts WHERE tenant = :tenant

-- name: oldest_queued
-- Answers (id): the run of a tenant that waits for a slot and was created first.
SELECT id FROM runs WHERE tenant = :tenant AND status = 'queued' ORDER BY created_at, id LIMIT 1

-- name: oldest_queued_of_all
-- Like oldest_queued, of all tenants.
SELECT id FROM runs WHERE status = 'queued' ORDER BY created_at, id LIMIT 1

-- name: queue_place
-- Answers (position, priority, fairness_key) of a run that waits: see core.queue.FairQueue.position. The 100 is its
-- KEYS_COUNTED_MAX. Only the branch that is chosen is computed.
WITH mine AS (
    SELECT waiting.tenant, waiting.priority, waiting.fairness_key, fairness_keys.turn,
        (
            SELECT count(*) FROM waiting AS earlier
            WHERE (earlier.tenant, earlier.priority, earlier.fairness_key)
                = (waiting.tenant, waiting.priority, waiting.fairness_key)
                AND earlier.ticket < waiting.ticket
        ) AS before,
        EXISTS (
            SELECT 1 FROM fairness_keys AS one
            WHERE (one.tenant, one.priority) = (waiting.tenant, waiting.priority)
            LIMIT 1 OFFSET 100
        ) AS has_many_keys
    FROM runs
        JOIN waiting ON waiting.run = runs.run
        JOIN fairness_keys USING (tenant, priority, fairness_key)
    WHERE (runs.tail, runs.head) = (substr(:run_id, 3), substr(:run_id, 1, 2))
)
SELECT
    1 + mine.before
    + (
        SELECT count(*) FROM waiting
        WHERE waiting.tenant = mine.tenant AND waiting.priority > mine.priority
    )
    + CASE WHEN mine.has_many_keys AND mine.before = 0 THEN (
        SELECT count(*) FROM fairness_keys AS other
        WHERE other.tenant = mine.tenant AND other.priority = mine.priority
            AND other.turn < mine.turn
    ) WHEN mine.has_many_keys THEN
        min(
            (
                SELECT count(*) FROM waiting
                WHERE waiting.tenant = mine.tenant AND waiting.priority = mine.priority
            ) - (
                SELECT count(*) FROM waiting
                WHERE waiting.tenant = mine.tenant AND waiting.priority = mine.priority
                    AND waiting.fairness_key = mine.fairness_key
            ),
            (
                SELECT (count(*) - 1) * mine.before + sum(other.turn < mine.turn)
                FROM fairness_keys AS other
                WHERE other.tenant = mine.tenant AND other.priority = mine.priority
            )
        )
    ELSE (
        SELECT coalesce(
            sum(
                min(
                    (
                        SELECT count(*) FROM waiting
                        WHERE waiting.tenant = other.tenant
                            AND waiting.priority = other.priority
                            AND waiting.fairness_key = other.fairness_key
                    ),
                    mine.before + (other.turn < mine.turn)
                )
            ),
            0
        )
        FROM fairness_keys AS other
        WHERE other.tenant = mine.tenant AND other.priority = mine.priority
            AND other.fairness_key <> mine.fairness_key
    ) END,
    mine.priority,
    mine.fairness_key
FROM mine

-- name: free_key
-- Removes the key of a run that ended without having begun.
DELETE FROM keys WHERE run = :run AND (tenant, key) = (SELECT tenant, key FROM runs WHERE run = :run)
