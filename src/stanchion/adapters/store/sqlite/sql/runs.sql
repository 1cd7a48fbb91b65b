-- Loading runs, and commits.

-- name: load_run
-- Answers the run's row and its origin, its steps as a JSON object, and its inbox as an array of
-- arrays (ticket, entry_id, event), in no order.
SELECT
    runs.id, runs.tenant, runs.workflow_id, runs.workflow_version, runs.created_at,
    runs.holds_slot, runs.status, runs.finished_at, runs.version, runs.nonce, runs.fence,
    runs.error, runs.output, origins.origin,
    (
        SELECT '{' || coalesce(
            group_concat(json_quote(step_id) || ':' || CAST(state AS TEXT), ','), ''
        ) || '}'
        FROM steps WHERE steps.run = runs.run
    ),
    (
        SELECT '[' || coalesce(
            group_concat(
                '[' || ticket || ',' || json_quote(entry_id) || ',' || CAST(event AS TEXT) || ']',
                ','
            ), ''
        ) || ']'
        FROM inbox WHERE inbox.run = runs.run
    )
FROM runs JOIN origins ON origins.run = runs.run
WHERE (runs.tail, runs.head) = (substr(:run_id, 3), substr(:run_id, 1, 2))

-- name: read_stamp
-- Answers (run, tenant, holds_slot, status, queued, ended_at, whether it has reservations, version,
-- nonce, fence), for the checks of a commit; `queued` is how many runs of its tenant wait for a slot.
SELECT
    run, tenant, holds_slot, status,
    (SELECT queued FROM accounts WHERE accounts.tenant = runs.tenant),
    ended_at,
    EXISTS (SELECT 1 FROM reservations WHERE reservations.run = runs.run),
    version, nonce, fence
FROM runs
WHERE (tail, head) = (substr(:run_id, 3), substr(:run_id, 1, 2))

-- name: read_to_settle
-- Answers the id, then as read_stamp, then whether the inbox has an entry, of each of the runs in
-- :run_ids, a JSON array.
SELECT
    runs.id, run, tenant, holds_slot, status,
    (SELECT queued FROM accounts WHERE accounts.tenant = runs.tenant),
    ended_at,
    EXISTS (SELECT 1 FROM reservations WHERE reservations.run = runs.run),
    version, nonce, fence,
    EXISTS (SELECT 1 FROM inbox WHERE inbox.run = runs.run)
FROM json_each(:run_ids)
CROSS JOIN runs ON (runs.tail, runs.head) = (substr(value, 3), substr(value, 1, 2))

-- name: read_others
-- Answers (others): whether the inbox of :run has entries besides :applied, a JSON array of ids.
SELECT EXISTS (
    SELECT 1 FROM inbox
    WHERE run = :run AND entry_id NOT IN (SELECT value FROM json_each(:applied))
)

-- name: commit_run
-- Writes a transition without its items and effects, see together.sql.
INSERT INTO commits (
    run, tenant, holds_slot, status, finished_at, ended_at, version, nonce, fence, error, output,
    steps, entries, applied, ends
) VALUES (
    :run, :tenant, :holds_slot, :status, :finished_at, :ended_at, :version, :nonce, :fence, :error,
    :output, :steps, :entries, :applied, :ends
)

-- name: active_runs
-- Answers (active).
SELECT active FROM accounts WHERE tenant = :tenant

-- name: waits_of_run
-- Answers (run, the highest count of failures in its inbox, when it is tried next).
SELECT
    runs.run,
    (SELECT coalesce(max(failures), 0) FROM inbox WHERE inbox.run = runs.run),
    (SELECT due FROM outbox WHERE outbox.run = runs.run)
FROM runs
WHERE (runs.tail, runs.head) = (substr(:run_id, 3), substr(:run_id, 1, 2))

-- name: jobs_in_state
-- Answers (id, step_id, item, topic, deliveries, fence, worker_id, expires_at, ticket) of the jobs
-- of a run in this state.
SELECT id, step_id, item, topic, deliveries, fence, worker_id, expires_at, ticket
FROM jobs WHERE run = :run AND state = :state LIMIT :limit

-- name: count_ahead
-- Answers (count): the ready jobs of the same tenant and topic before this ticket.
SELECT count(*) FROM jobs
WHERE state = 'ready' AND topic = :topic AND tenant = :tenant AND ticket < :ticket

-- name: timers_of_run
-- Answers (due, timer).
SELECT due, timer FROM timers WHERE run = :run LIMIT :limit

-- name: letters_of_run
-- Answers (body) of the dead letters of a run, oldest first.
SELECT body FROM dead_letters WHERE run = :run ORDER BY letter LIMIT :limit
