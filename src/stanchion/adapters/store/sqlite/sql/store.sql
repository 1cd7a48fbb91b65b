-- Statements for opening the store and for health checks.

-- name: highest_ticket
-- Answers (ticket): the highest ticket in the file, 0 if there is none.
SELECT max(
    coalesce((SELECT max(ticket) FROM inbox), 0),
    coalesce((SELECT max(turn) FROM outbox), 0),
    coalesce((SELECT max(ticket) FROM jobs WHERE state = 'ready'), 0),
    coalesce((SELECT max(turn) FROM queues), 0),
    coalesce((SELECT max(ticket) FROM waiting), 0),
    coalesce((SELECT max(turn) FROM fairness_keys), 0)
)

-- name: look
-- Reads a little from the file.
SELECT run FROM runs ORDER BY run LIMIT 1

-- name: leave_a_mark
-- Writes a little to the file, which fails on a full disk.
INSERT INTO documents (kind, name, revision, value) VALUES ('ping', 'store', 1, x'30')
ON CONFLICT (kind, name) DO UPDATE SET revision = revision + 1
