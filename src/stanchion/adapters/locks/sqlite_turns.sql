-- The queue of waiters for a lock. A ticket is valid while its `expires_at` is in the future, by the
-- same clock as the lock.

-- name: first_in_line
-- Answers (token, expires_at).
SELECT token, expires_at FROM turns WHERE name = :name AND expires_at > :now
ORDER BY number LIMIT 1

-- name: drop_late
-- Removes all expired tickets, for any name.
DELETE FROM turns WHERE expires_at <= :now

-- name: join
-- Adds the token at the end of the queue, or renews its ticket in its place.
INSERT INTO turns (name, token, number, expires_at)
VALUES (
    :name, :token,
    (SELECT coalesce(max(number), 0) + 1 FROM turns WHERE name = :name),
    :expires_at
)
ON CONFLICT (name, token) DO UPDATE SET expires_at = excluded.expires_at

-- name: place
-- Answers (number of waiters ahead, end of the first ticket, end of the lock's term); nothing if the
-- token has no ticket.
SELECT
    (SELECT count(*) FROM turns AS t
     WHERE t.name = :name AND t.expires_at > :now AND t.number < mine.number),
    (SELECT t.expires_at FROM turns AS t
     WHERE t.name = :name AND t.expires_at > :now ORDER BY t.number LIMIT 1),
    coalesce((SELECT locks.expires_at FROM locks WHERE locks.name = :name), 0)
FROM turns AS mine WHERE mine.name = :name AND mine.token = :token AND mine.expires_at > :now

-- name: holder
-- Answers (token) if the lock is held.
SELECT token FROM locks WHERE name = :name AND expires_at > :now

-- name: leave
DELETE FROM turns WHERE name = :name AND token = :token
