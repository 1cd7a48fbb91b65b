-- Dead letters.

-- name: add_letter
-- Stores a letter as the newest one. It replaces the one with the same id.
INSERT OR REPLACE INTO dead_letters (id, tenant, run, body) VALUES (:id, :tenant, :run, :body)

-- name: take_letter
-- Removes a letter. Answers (body, run).
DELETE FROM dead_letters WHERE id = :id RETURNING body, run

-- name: list_letters
-- Answers (letter, body), oldest first.
SELECT letter, body FROM dead_letters WHERE letter > :after ORDER BY letter LIMIT :limit

-- name: list_letters_of_tenant
-- Like list_letters, of one tenant.
SELECT letter, body FROM dead_letters
WHERE tenant = :tenant AND letter > :after ORDER BY letter LIMIT :limit

-- name: is_ended
-- Answers (ended_at) of a run.
SELECT ended_at FROM runs WHERE run = :run
