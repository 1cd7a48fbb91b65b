-- The first schema. Times are milliseconds since the epoch; BLOB columns hold JSON.
--
-- Rows that stand in a line (jobs, tenants in a ring, inbox entries) carry tickets: numbers that
-- the store draws from one counter, which only rises. A smaller ticket is further ahead.
--
-- Ids of runs, and of jobs after them, begin with two letters for their shard, then the time. They
-- are indexed the other way round, `tail` before `head`: so new ones come last, all in one place,
-- and not in as many places as there are shards.

-- ── Runs ────────────────────────────────────────────────────────────────────────────────────────

-- What changes about a run, and what lists show. `run` is its short name inside this file.
CREATE TABLE runs (
    run INTEGER PRIMARY KEY,
    id TEXT NOT NULL,
    head TEXT AS (substr(id, 1, 2)) VIRTUAL,
    tail TEXT AS (substr(id, 3)) VIRTUAL,
    tenant TEXT NOT NULL,
    workflow_id TEXT NOT NULL,
    workflow_version INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    holds_slot INTEGER NOT NULL,
    key TEXT,                       -- its idempotency key
    status TEXT NOT NULL,
    finished_at INTEGER,            -- as decided
    ended_at INTEGER,               -- by the store's clock; NULL exactly while it is unfinished
    version INTEGER NOT NULL,
    nonce TEXT NOT NULL,
    fence INTEGER NOT NULL,         -- the highest that has written
    error BLOB,
    output BLOB                     -- last: lists do not read that far
) STRICT;

CREATE UNIQUE INDEX runs_by_id ON runs (tail, head);
CREATE INDEX runs_by_age ON runs (tenant, created_at, id);
CREATE INDEX runs_by_status ON runs (tenant, status, created_at, id);
CREATE INDEX runs_by_end ON runs (coalesce(finished_at, ended_at)) WHERE ended_at IS NOT NULL;

-- What never changes about a run: its input may be large, and is written once.
CREATE TABLE origins (
    run INTEGER PRIMARY KEY,
    origin BLOB NOT NULL
) STRICT;

CREATE TABLE steps (
    run INTEGER NOT NULL,
    step_id TEXT NOT NULL,
    state BLOB NOT NULL,
    PRIMARY KEY (run, step_id)
) STRICT, WITHOUT ROWID;

CREATE TABLE items (
    run INTEGER NOT NULL,
    step_id TEXT NOT NULL,
    item INTEGER NOT NULL,
    state BLOB NOT NULL,
    PRIMARY KEY (run, step_id, item)
) STRICT, WITHOUT ROWID;

-- One row per commit that wrote history. It is a run's timeline and its tenant's feed at once.
CREATE TABLE history (
    tenant TEXT NOT NULL,
    position INTEGER NOT NULL,      -- in the tenant's feed
    run INTEGER NOT NULL,
    entries BLOB NOT NULL,
    PRIMARY KEY (tenant, position)
) STRICT, WITHOUT ROWID;

CREATE INDEX history_by_run ON history (run, position);

CREATE TABLE keys (
    tenant TEXT NOT NULL,
    key TEXT NOT NULL,
    run INTEGER NOT NULL,
    fingerprint TEXT NOT NULL,
    PRIMARY KEY (tenant, key)
) STRICT, WITHOUT ROWID;

-- ── What lies before a run ──────────────────────────────────────────────────────────────────────

CREATE TABLE inbox (
    run INTEGER NOT NULL,
    ticket INTEGER NOT NULL,
    entry_id TEXT NOT NULL,
    failures INTEGER NOT NULL DEFAULT 0,
    event BLOB NOT NULL,
    PRIMARY KEY (run, ticket)
) STRICT, WITHOUT ROWID;

CREATE UNIQUE INDEX inbox_by_entry ON inbox (run, entry_id);

-- A run that nothing was ever put before has no row here. A row that is not due at any time counts
-- as none: it only remembers the number, so that no row is ever taken for an earlier one.
CREATE TABLE outbox (
    run INTEGER PRIMARY KEY,
    number INTEGER NOT NULL,        -- how much was ever put into the run's inbox
    turn INTEGER NOT NULL,          -- a ticket: of rows due at the same time, which is first
    due INTEGER
) STRICT;

CREATE INDEX outbox_by_due ON outbox (due, turn) WHERE due IS NOT NULL;

CREATE TABLE timers (
    run INTEGER NOT NULL,
    step_id TEXT NOT NULL,          -- '' for a timer of the run
    key TEXT NOT NULL,
    due INTEGER NOT NULL,
    timer BLOB NOT NULL,
    PRIMARY KEY (run, step_id, key)
) STRICT, WITHOUT ROWID;

CREATE INDEX timers_by_due ON timers (due);

-- ── Jobs ────────────────────────────────────────────────────────────────────────────────────────

CREATE TABLE jobs (
    job INTEGER PRIMARY KEY,
    id TEXT NOT NULL,
    head TEXT AS (substr(id, 1, 2)) VIRTUAL,
    tail TEXT AS (substr(id, 3)) VIRTUAL,
    run INTEGER NOT NULL,
    tenant TEXT NOT NULL,
    topic TEXT NOT NULL,
    step_id TEXT NOT NULL,
    item INTEGER,
    attempt INTEGER NOT NULL,
    dispatch INTEGER NOT NULL,
    state TEXT NOT NULL,
    ticket INTEGER,                 -- its place in its queue, while it is ready
    fence INTEGER NOT NULL DEFAULT 0,
    deliveries INTEGER NOT NULL DEFAULT 0,
    worker_id TEXT,
    expires_at INTEGER              -- of its lease, while it is leased
) STRICT;

CREATE UNIQUE INDEX jobs_by_id ON jobs (tail, head);
CREATE INDEX jobs_of_run ON jobs (run, state, step_id);
CREATE INDEX jobs_ready ON jobs (topic, tenant, ticket) WHERE state = 'ready';
CREATE INDEX jobs_leased ON jobs (expires_at) WHERE state = 'leased';

-- Apart from the job, which is rewritten with every lease and renewal.
CREATE TABLE job_inputs (
    job INTEGER PRIMARY KEY,
    input BLOB NOT NULL
) STRICT;

-- The ready jobs of one tenant for one topic; no row without jobs. `turn` is the ticket drawn when
-- the tenant was last served, `served` when this queue was: the smallest `turn` is the next tenant,
-- and of one tenant's queues the smallest `served` is the next topic.
CREATE TABLE queues (
    topic TEXT NOT NULL,
    tenant TEXT NOT NULL,
    turn INTEGER NOT NULL,
    served INTEGER NOT NULL,
    ready INTEGER NOT NULL,
    PRIMARY KEY (topic, tenant)
) STRICT, WITHOUT ROWID;

CREATE INDEX queues_ring ON queues (topic, turn, served);

-- ── Tenants, definitions, documents, dead letters ───────────────────────────────────────────────

CREATE TABLE tenants (
    tenant TEXT PRIMARY KEY,
    config BLOB NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE accounts (
    tenant TEXT PRIMARY KEY,
    active INTEGER NOT NULL DEFAULT 0,          -- slots in use
    rate_used_until_ms REAL NOT NULL DEFAULT 0,
    feed_end INTEGER NOT NULL DEFAULT 0         -- no position up to here is given out again
) STRICT, WITHOUT ROWID;

CREATE TABLE workflows (
    tenant TEXT NOT NULL,
    workflow_id TEXT NOT NULL,
    version INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    workflow BLOB NOT NULL,
    PRIMARY KEY (tenant, workflow_id, version)
) STRICT, WITHOUT ROWID;

CREATE TABLE newest_workflows (
    tenant TEXT NOT NULL,
    workflow_id TEXT NOT NULL,
    version INTEGER NOT NULL,
    PRIMARY KEY (tenant, workflow_id)
) STRICT, WITHOUT ROWID;

CREATE TABLE documents (
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    revision INTEGER NOT NULL,
    value BLOB NOT NULL,
    PRIMARY KEY (kind, name)
) STRICT, WITHOUT ROWID;

CREATE TABLE dead_letters (
    letter INTEGER PRIMARY KEY AUTOINCREMENT,   -- never used again: cursors point at it
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    run INTEGER NOT NULL,
    body BLOB NOT NULL
) STRICT;

CREATE INDEX dead_letters_by_tenant ON dead_letters (tenant, letter);
CREATE INDEX dead_letters_by_run ON dead_letters (run);
