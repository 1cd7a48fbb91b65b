-- History: one row per commit, read as a run's timeline or as a tenant's feed.

-- name: read_timeline
-- Answers (position, entries) of a run, oldest first, from :start on.
SELECT position, entries FROM history
WHERE run = (
    SELECT run FROM runs WHERE (tail, head) = (substr(:run_id, 3), substr(:run_id, 1, 2))
) AND position >= :start
ORDER BY position LIMIT :limit

-- name: read_feed
-- Answers (position, run_id, entries) of a tenant, oldest first, after :after.
SELECT history.position, runs.id, history.entries
FROM history JOIN runs ON runs.run = history.run
WHERE history.tenant = :tenant AND history.position > :after
ORDER BY history.position LIMIT :limit

-- name: feed_end
-- Answers (position): the last position used, 0 if there was none.
SELECT max(
    coalesce((SELECT max(position) FROM history WHERE tenant = :tenant), 0),
    coalesce((SELECT feed_end FROM accounts WHERE tenant = :tenant), 0)
)
