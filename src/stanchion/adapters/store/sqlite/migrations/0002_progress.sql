-- The progress last reported with a renewal, as JSON. NULL while the job is not leased.
ALTER TABLE jobs ADD COLUMN progress BLOB;
