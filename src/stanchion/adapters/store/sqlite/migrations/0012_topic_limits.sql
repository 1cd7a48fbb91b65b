-- The tokens of topic limits, and up to when the rate of each pool is used.
CREATE TABLE limit_tokens (
    pool TEXT NOT NULL,
    number INTEGER NOT NULL,
    token TEXT NOT NULL,
    expires_at INTEGER NOT NULL,
    PRIMARY KEY (pool, number)
) WITHOUT ROWID;
CREATE UNIQUE INDEX limit_tokens_by_name ON limit_tokens (pool, token);
CREATE INDEX limit_tokens_by_end ON limit_tokens (expires_at);
CREATE TABLE limit_rates (
    pool TEXT NOT NULL PRIMARY KEY,
    used_until_ms REAL NOT NULL
) WITHOUT ROWID;
