-- Batches of receipts of refusals.
CREATE TABLE receipts (
    batch INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    at INTEGER NOT NULL,
    count INTEGER NOT NULL,
    body BLOB NOT NULL
);
CREATE INDEX receipts_of_tenant ON receipts (tenant, batch, count);
CREATE INDEX receipts_by_time ON receipts (at);
