-- The runs that wait for a slot of their tenant. Of one priority and fairness key, the smallest
-- ticket is first.
CREATE TABLE waiting (
    run INTEGER PRIMARY KEY,
    tenant TEXT NOT NULL,
    priority INTEGER NOT NULL,
    fairness_key TEXT NOT NULL,
    ticket INTEGER NOT NULL
) STRICT;

CREATE INDEX waiting_by_key ON waiting (tenant, priority, fairness_key, ticket);

-- The fairness keys with waiting runs. Of one priority, the smallest turn is next; it is the ticket
-- drawn when the key joined the ring or was last served.
CREATE TABLE fairness_keys (
    tenant TEXT NOT NULL,
    priority INTEGER NOT NULL,
    fairness_key TEXT NOT NULL,
    turn INTEGER NOT NULL,
    PRIMARY KEY (tenant, priority, fairness_key)
) STRICT, WITHOUT ROWID;

CREATE INDEX fairness_ring ON fairness_keys (tenant, priority DESC, turn);

ALTER TABLE accounts ADD COLUMN queued INTEGER NOT NULL DEFAULT 0;  -- rows in `waiting`
