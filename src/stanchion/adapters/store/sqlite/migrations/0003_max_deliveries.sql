-- The limit of deliveries of one attempt, from the workflow. NULL: the limit of the server.
ALTER TABLE jobs ADD COLUMN max_deliveries INTEGER;
