-- Approvals that wait for a decision: the list is ordered by time, run and step.
CREATE TABLE approvals (
    run INTEGER NOT NULL,
    step_id TEXT NOT NULL,
    tenant TEXT NOT NULL,
    since INTEGER NOT NULL,
    run_id TEXT NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (run, step_id)
) WITHOUT ROWID;
CREATE INDEX approvals_by_time ON approvals (since, run_id, step_id);
CREATE INDEX approvals_of_tenant ON approvals (tenant, since, run_id, step_id);
