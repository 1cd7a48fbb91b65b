-- What is asked when the store is opened, and by whoever wants to know whether it answers.

-- name: highest_ticket
-- Answers (ticket): the highest that anything in the file carries, 0 if nothing does.
SELECT max(
    coalesce((SELECT max(ticket) FROM inbox), 0),
    coalesce((SELECT max(turn) FROM outbox), 0),
    coalesce((SELECT max(ticket) FROM jobs WHERE state = 'ready'), 0),
    coalesce((SELECT max(turn) FROM queues), 0)
)

-- name: look
-- Reads the file, and next to nothing of it.
SELECT run FROM runs ORDER BY run LIMIT 1

-- name: leave_a_mark
-- Writes, and next to nothing: a disk that is full refuses it.
INSERT INTO documents (kind, name, revision, value) VALUES ('ping', 'store', 1, x'30')
ON CONFLICT (kind, name) DO UPDATE SET revision = revision + 1
