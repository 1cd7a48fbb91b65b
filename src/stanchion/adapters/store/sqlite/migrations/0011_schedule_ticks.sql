-- The mark of each schedule: generation and tick of its last run.
CREATE TABLE schedule_ticks (
    tenant TEXT NOT NULL,
    schedule TEXT NOT NULL,
    generation INTEGER NOT NULL,
    tick INTEGER NOT NULL,
    PRIMARY KEY (tenant, schedule)
) WITHOUT ROWID;
