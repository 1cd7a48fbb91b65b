-- The first schema of the file with locks.

CREATE TABLE locks (
    name TEXT PRIMARY KEY,
    token TEXT NOT NULL,            -- of the last holder
    fence INTEGER NOT NULL,         -- of the last grant
    expires_at INTEGER NOT NULL     -- held until then; in the past: free
) STRICT, WITHOUT ROWID;

CREATE INDEX locks_by_fence ON locks (fence);
