-- Since when the lock is held, and how often its term was restarted. NULL for a lock that an older
-- version granted.
ALTER TABLE locks ADD COLUMN acquired_at INTEGER;
ALTER TABLE locks ADD COLUMN renewals INTEGER NOT NULL DEFAULT 0;
