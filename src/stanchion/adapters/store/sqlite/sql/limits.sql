-- The tokens of topic limits. Those of a pool are numbered in the order in which they were taken.

-- name: drop_expired_tokens
-- Removes expired tokens of all pools.
DELETE FROM limit_tokens WHERE expires_at <= :now

-- name: count_tokens
-- Answers (tokens): the unexpired tokens of a pool.
SELECT count(*) FROM limit_tokens WHERE pool = :pool AND expires_at > :now

-- name: find_token
-- Answers (number) of a token.
SELECT number FROM limit_tokens WHERE pool = :pool AND token = :token

-- name: count_tokens_before
-- Answers (tokens): how many of the pool were taken before this one.
SELECT count(*) FROM limit_tokens WHERE pool = :pool AND number < :number

-- name: add_token
-- Adds a token after all others of its pool.
INSERT INTO limit_tokens (pool, number, token, expires_at)
SELECT :pool, coalesce(max(number), 0) + 1, :token, :expires_at
FROM limit_tokens WHERE pool = :pool

-- name: extend_token
-- Extends a token, under a new name.
UPDATE limit_tokens SET token = :token, expires_at = :expires_at
WHERE pool = :pool AND number = :number

-- name: remove_token
-- Removes a token.
DELETE FROM limit_tokens WHERE pool = :pool AND token = :token AND expires_at > :now

-- name: show_limit_rate
-- Answers (used_until_ms) of a pool.
SELECT used_until_ms FROM limit_rates WHERE pool = :pool

-- name: set_limit_rate
-- Sets up to when the rate of a pool is used.
INSERT INTO limit_rates (pool, used_until_ms) VALUES (:pool, :used_until_ms)
ON CONFLICT (pool) DO UPDATE SET used_until_ms = excluded.used_until_ms
