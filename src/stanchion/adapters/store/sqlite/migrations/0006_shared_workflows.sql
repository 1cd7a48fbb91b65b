-- Shared workflows are in `workflows` and `newest_workflows` under the tenant `*`.

-- The versions of shared workflows that a tenant's configuration pins.
CREATE TABLE pins (
    tenant TEXT NOT NULL,
    workflow_id TEXT NOT NULL,
    version INTEGER NOT NULL,
    PRIMARY KEY (tenant, workflow_id)
) STRICT, WITHOUT ROWID;

-- The unfinished runs of shared workflows.
CREATE TABLE shared_runs (
    run INTEGER PRIMARY KEY,
    workflow_id TEXT NOT NULL,
    tenant TEXT NOT NULL
) STRICT;

CREATE INDEX shared_runs_by_workflow ON shared_runs (workflow_id, tenant);
