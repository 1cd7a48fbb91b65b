-- What runs use and hold of each budget of a tenant, in the present window.
CREATE TABLE budgets (
    tenant TEXT NOT NULL,
    name TEXT NOT NULL,
    window TEXT NOT NULL,
    start INTEGER NOT NULL,
    generation INTEGER NOT NULL,    -- of the window; rises with each new one
    used INTEGER NOT NULL,
    held INTEGER NOT NULL,          -- what unfinished runs have reserved and not used
    PRIMARY KEY (tenant, name)
) STRICT, WITHOUT ROWID;

-- What an unfinished run has reserved and used of each budget.
CREATE TABLE reservations (
    run INTEGER NOT NULL,
    name TEXT NOT NULL,
    generation INTEGER NOT NULL,    -- of the window in which it was admitted
    reserved INTEGER NOT NULL,
    used INTEGER NOT NULL,
    PRIMARY KEY (run, name)
) STRICT, WITHOUT ROWID;

-- What the job has reported as used under its fence, as a JSON object. NULL without a report.
ALTER TABLE jobs ADD COLUMN usage BLOB;
