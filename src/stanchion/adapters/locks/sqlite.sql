-- Locks in a file. Times are milliseconds by the clock of the process that asks. A lock is held
-- while its `expires_at` is in the future.

-- name: read_lock
-- Answers (token, fence, expires_at).
SELECT token, fence, expires_at FROM locks WHERE name = :name

-- name: grant
-- Grants the lock to the token with this fence and term.
INSERT INTO locks (name, token, fence, expires_at, acquired_at)
VALUES (:name, :token, :fence, :expires_at, :acquired_at)
ON CONFLICT (name) DO UPDATE SET
    token = excluded.token, fence = excluded.fence, expires_at = excluded.expires_at,
    acquired_at = excluded.acquired_at, renewals = 0

-- name: grant_again
-- Restarts the term for the holder, which repeats its call.
UPDATE locks SET expires_at = :expires_at WHERE name = :name

-- name: show_lock
-- Answers (name, token, fence, expires_at, acquired_at, renewals).
SELECT name, token, fence, expires_at, acquired_at, renewals FROM locks WHERE name = :name

-- name: renew
-- Restarts the term if the token still has the lock.
UPDATE locks SET expires_at = :expires_at, renewals = renewals + 1
WHERE name = :name AND token = :token AND expires_at > :now

-- name: release
-- Ends the term of this token, also for a clock that is set back. The fence is kept.
UPDATE locks SET expires_at = 0 WHERE name = :name AND token = :token AND expires_at > :now

-- name: force_release
-- Like release, for any holder.
UPDATE locks SET expires_at = 0 WHERE name = :name AND expires_at > :now

-- name: list_locks
-- Answers the columns of show_lock of the held locks, by name, from :first up to :last.
SELECT name, token, fence, expires_at, acquired_at, renewals FROM locks
WHERE name >= :first AND name <= :last AND expires_at > :now
ORDER BY name LIMIT :limit

-- name: forget
-- Removes a few names that were last held before :before. Their fences are also in the past, so the
-- clock gives higher ones.
DELETE FROM locks WHERE name IN (
    SELECT name FROM locks WHERE fence < :before * 1000 AND expires_at < :before
    ORDER BY fence LIMIT :limit
)

-- name: write_note
-- Writes a note, once.
INSERT INTO notes (id, name, text, fence) VALUES (:id, :name, :text, :fence)
ON CONFLICT (id) DO NOTHING

-- name: list_notes
-- Answers (id, name, text, fence).
SELECT id, name, text, fence FROM notes ORDER BY id LIMIT :limit

-- name: drop_note
-- Removes a note.
DELETE FROM notes WHERE id = :id
