-- How often one attempt at the job may be delivered, from its workflow. NULL: as the server says.
ALTER TABLE jobs ADD COLUMN max_deliveries INTEGER;
