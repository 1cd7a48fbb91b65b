-- What lists show of a run beside its row, if it is not the default; labels are a JSON object.
CREATE TABLE marks (
    run INTEGER PRIMARY KEY,
    tenant TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    id TEXT NOT NULL,
    risk TEXT NOT NULL,
    labels BLOB,
    rerun_of TEXT
) STRICT;
CREATE INDEX marks_by_rerun ON marks (rerun_of, created_at, id) WHERE rerun_of IS NOT NULL;

-- Each label of a run as one text, `name:value`.
CREATE TABLE labels (
    tenant TEXT NOT NULL,
    label TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    id TEXT NOT NULL,
    run INTEGER NOT NULL,
    PRIMARY KEY (tenant, label, created_at, id)
) STRICT, WITHOUT ROWID;
CREATE INDEX labels_of_all ON labels (label, created_at, id, run);
CREATE INDEX labels_by_run ON labels (run);

-- Of earlier runs. The search for the text is cheap; most runs need no more.
INSERT INTO marks (run, tenant, created_at, id, risk, rerun_of)
    SELECT run, tenant, created_at, id, risk, rerun_of FROM (
        SELECT
            runs.run, runs.tenant, runs.created_at, runs.id,
            coalesce(json_extract(CAST(origin AS TEXT), '$.risk'), 'standard') AS risk,
            json_extract(CAST(origin AS TEXT), '$.rerun_of') AS rerun_of
        FROM origins JOIN runs ON runs.run = origins.run
        WHERE instr(origin, CAST('"risk":' AS BLOB)) OR instr(origin, CAST('"rerun_of":' AS BLOB))
    )
    WHERE risk <> 'standard' OR rerun_of IS NOT NULL;

-- When a tenant last started a run.
ALTER TABLE accounts ADD COLUMN seen_at INTEGER NOT NULL DEFAULT 0;
INSERT INTO accounts (tenant, seen_at)
    SELECT tenant, max(created_at) FROM runs GROUP BY tenant
    ON CONFLICT (tenant) DO UPDATE SET seen_at = excluded.seen_at;

-- All runs of a tenant are read by status, one range for each: one index less for every start.
DROP INDEX runs_by_age;
CREATE INDEX runs_of_all ON runs (status, created_at, id);
CREATE INDEX runs_by_workflow ON runs (tenant, workflow_id, created_at, id);
