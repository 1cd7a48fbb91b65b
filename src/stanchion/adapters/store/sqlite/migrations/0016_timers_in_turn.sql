-- Timers of each tenant, and the order in which tenants take turns to have theirs fired.
DROP INDEX timers_by_due;

ALTER TABLE timers ADD COLUMN tenant TEXT NOT NULL DEFAULT '';

UPDATE timers SET tenant = (SELECT tenant FROM runs WHERE runs.run = timers.run);

CREATE INDEX timers_of_tenant ON timers (tenant, due);

CREATE TABLE timer_turns (
    tenant TEXT PRIMARY KEY,
    due INTEGER NOT NULL            -- of its next timer or earlier; of one that is due, its last turn
) STRICT, WITHOUT ROWID;

CREATE INDEX timer_turns_by_due ON timer_turns (due);

INSERT INTO timer_turns (tenant, due) SELECT tenant, min(due) FROM timers GROUP BY tenant;
