-- Locks in a file. Times are milliseconds by the clock of the process that asks. A lock is held
-- while its `expires_at` is in the future.

-- name: read_lock
-- Answers (token, fence, expires_at).
SELECT token, fence, expires_at FROM locks WHERE name = :name

-- name: grant
-- The name is the token's, under this fence, until then.
INSERT INTO locks (name, token, fence, expires_at) VALUES (:name, :token, :fence, :expires_at)
ON CONFLICT (name) DO UPDATE SET
    token = excluded.token, fence = excluded.fence, expires_at = excluded.expires_at

-- name: renew
-- Begins the term anew, if the token still has the name.
UPDATE locks SET expires_at = :expires_at
WHERE name = :name AND token = :token AND expires_at > :now

-- name: release
-- Ends the term of the token's holder, also for a clock that is set back. The fence stays.
UPDATE locks SET expires_at = 0 WHERE name = :name AND token = :token AND expires_at > :now

-- name: force_release
-- As release, whoever the holder is.
UPDATE locks SET expires_at = 0 WHERE name = :name AND expires_at > :now

-- name: list_locks
-- Answers (name, fence, expires_at) of those held, by name, from :first up to :last.
SELECT name, fence, expires_at FROM locks
WHERE name >= :first AND name <= :last AND expires_at > :now
ORDER BY name LIMIT :limit

-- name: forget
-- Removes a few names that nobody has had since :before. Their fences lie in the past as well, so
-- the clock alone gives higher ones.
DELETE FROM locks WHERE name IN (
    SELECT name FROM locks WHERE fence < :before * 1000 AND expires_at < :before
    ORDER BY fence LIMIT :limit
)
