-- The line of those who wait for a lock. A ticket counts while its `expires_at` is in the future; the
-- lock's own row is read by the same clock.

-- name: first_in_line
-- Answers (token, expires_at).
SELECT token, expires_at FROM turns WHERE name = :name AND expires_at > :now
ORDER BY number LIMIT 1

-- name: drop_late
-- Removes the tickets that ran out, whoever's they were and for whatever name.
DELETE FROM turns WHERE expires_at <= :now

-- name: join
-- Puts the token at the end of the line, or keeps it where it stands.
INSERT INTO turns (name, token, number, expires_at)
VALUES (
    :name, :token,
    (SELECT coalesce(max(number), 0) + 1 FROM turns WHERE name = :name),
    :expires_at
)
ON CONFLICT (name, token) DO UPDATE SET expires_at = excluded.expires_at

-- name: place
-- Answers (how many are ahead, when the first ticket in line ends, when the lock's term ends);
-- nothing, if the token has no ticket.
SELECT
    (SELECT count(*) FROM turns AS t
     WHERE t.name = :name AND t.expires_at > :now AND t.number < mine.number),
    (SELECT t.expires_at FROM turns AS t
     WHERE t.name = :name AND t.expires_at > :now ORDER BY t.number LIMIT 1),
    coalesce((SELECT locks.expires_at FROM locks WHERE locks.name = :name), 0)
FROM turns AS mine WHERE mine.name = :name AND mine.token = :token AND mine.expires_at > :now

-- name: holder
-- Answers (token) if somebody has the lock.
SELECT token FROM locks WHERE name = :name AND expires_at > :now

-- name: leave
DELETE FROM turns WHERE name = :name AND token = :token
