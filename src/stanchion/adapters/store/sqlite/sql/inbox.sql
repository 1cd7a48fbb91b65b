-- A run's inbox and its outbox row. `run` is the run's number in this file.

-- name: find_run
-- Answers (run, ended_at).
SELECT run, ended_at FROM runs
WHERE (tail, head) = (substr(:run_id, 3), substr(:run_id, 1, 2))

-- name: put_entry
-- Adds an entry to the inbox of a run, see together.sql.
INSERT INTO arrivals (run, ticket, entry_id, event, due)
VALUES (:run, :ticket, :entry_id, :event, :due)

-- name: find_entry
-- Answers (tenant, run, event) of one entry.
SELECT runs.tenant, runs.run, inbox.event
FROM runs JOIN inbox ON inbox.run = runs.run
WHERE (runs.tail, runs.head) = (substr(:run_id, 3), substr(:run_id, 1, 2))
    AND inbox.entry_id = :entry_id

-- name: remove_entry
-- Removes one entry, if it is there.
DELETE FROM inbox WHERE run = :run AND entry_id = :entry_id

-- name: rest_outbox
-- Makes the run's row due at no time if its inbox is empty.
UPDATE outbox SET due = NULL
WHERE run = :run AND due IS NOT NULL AND NOT EXISTS (SELECT 1 FROM inbox WHERE run = :run)

-- name: count_failure
-- Raises and answers (failures) of one entry.
UPDATE inbox SET failures = failures + 1
WHERE run = (
    SELECT run FROM runs WHERE (tail, head) = (substr(:run_id, 3), substr(:run_id, 1, 2))
) AND entry_id = :entry_id
RETURNING failures
