-- The audit log. ``once`` keeps an entry that came from elsewhere from being written twice.
CREATE TABLE audit_log (
    entry INTEGER PRIMARY KEY,
    at INTEGER NOT NULL,
    tenant TEXT,
    actor TEXT NOT NULL,
    action TEXT NOT NULL,
    once TEXT UNIQUE,
    body BLOB NOT NULL
);
CREATE INDEX audit_by_time ON audit_log (at);
CREATE INDEX audit_of_tenant ON audit_log (tenant, at);
CREATE INDEX audit_of_actor ON audit_log (actor, at);
CREATE INDEX audit_of_action ON audit_log (action, at);
