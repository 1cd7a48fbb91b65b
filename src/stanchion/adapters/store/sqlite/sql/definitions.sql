-- Workflows by version, tenants, documents. Shared workflows have the tenant `*`.

-- name: newest_workflow
-- Answers (workflow, version, created_at).
SELECT workflows.workflow, workflows.version, workflows.created_at
FROM newest_workflows JOIN workflows USING (tenant, workflow_id, version)
WHERE newest_workflows.tenant = :tenant AND newest_workflows.workflow_id = :workflow_id

-- name: workflow_in_force
-- Answers (tenant, version, is_pinned), the tenant `*` for the shared workflow: the newest own one,
-- or else the shared one. :source is 'own' or 'shared' to consider only one of them, or ''.
SELECT tenant, version, 0 FROM newest_workflows
WHERE :source <> 'shared' AND tenant = :tenant AND workflow_id = :workflow_id
UNION ALL
SELECT newest.tenant, coalesce(pins.version, newest.version), pins.version IS NOT NULL
FROM newest_workflows AS newest
LEFT JOIN pins ON pins.tenant = :tenant AND pins.workflow_id = :workflow_id
WHERE :source <> 'own' AND newest.tenant = '*' AND newest.workflow_id = :workflow_id
-- The names of all tenants sort after `*`.
ORDER BY tenant DESC LIMIT 1

-- name: workflow_version
-- Answers (workflow, version, created_at).
SELECT workflow, version, created_at FROM workflows
WHERE tenant = :tenant AND workflow_id = :workflow_id AND version = :version

-- name: add_workflow
-- Adds a version. Versions are never changed.
INSERT INTO workflows (tenant, workflow_id, version, created_at, workflow)
VALUES (:tenant, :workflow_id, :version, :created_at, :workflow)

-- name: point_at_newest
-- Makes this version the newest, which new runs use.
INSERT INTO newest_workflows (tenant, workflow_id, version)
VALUES (:tenant, :workflow_id, :version)
ON CONFLICT (tenant, workflow_id) DO UPDATE SET version = excluded.version

-- name: list_workflows
-- Answers (workflow_id, workflow, version, created_at): the newest of each, by id, after :after.
SELECT workflows.workflow_id, workflows.workflow, workflows.version, workflows.created_at
FROM newest_workflows JOIN workflows USING (tenant, workflow_id, version)
WHERE newest_workflows.tenant = :tenant AND newest_workflows.workflow_id > :after
ORDER BY newest_workflows.workflow_id LIMIT :limit

-- name: list_workflows_in_force
-- Answers (workflow_id, workflow, version, created_at, tenant, is_pinned), by id, after :after: see
-- workflow_in_force.
WITH in_force AS (
    SELECT workflow_id, tenant, version, 0 AS is_pinned FROM newest_workflows
    WHERE tenant = :tenant AND workflow_id > :after
    UNION ALL
    SELECT shared.workflow_id, shared.tenant, coalesce(pins.version, shared.version),
        pins.version IS NOT NULL
    FROM newest_workflows AS shared
    LEFT JOIN pins ON pins.tenant = :tenant AND pins.workflow_id = shared.workflow_id
    WHERE shared.tenant = '*' AND shared.workflow_id > :after AND NOT EXISTS (
        SELECT 1 FROM newest_workflows AS own
        WHERE own.tenant = :tenant AND own.workflow_id = shared.workflow_id
    )
    ORDER BY workflow_id LIMIT :limit
)
SELECT in_force.workflow_id, workflows.workflow, workflows.version, workflows.created_at,
    in_force.tenant, in_force.is_pinned
FROM in_force JOIN workflows USING (tenant, workflow_id, version)
ORDER BY in_force.workflow_id

-- name: list_workflow_uses
-- Answers (tenant, own, pin, newest, active) of the tenants that are known, by name, after :after.
WITH known AS (
    SELECT tenant FROM tenants WHERE tenant > :after
    UNION
    SELECT tenant FROM accounts WHERE tenant > :after
    UNION
    SELECT tenant FROM newest_workflows WHERE tenant > :after AND tenant <> '*'
    ORDER BY tenant LIMIT :limit
)
SELECT
    known.tenant,
    (
        SELECT version FROM newest_workflows AS own
        WHERE own.tenant = known.tenant AND own.workflow_id = :workflow_id
    ),
    (
        SELECT version FROM pins
        WHERE pins.tenant = known.tenant AND pins.workflow_id = :workflow_id
    ),
    (SELECT version FROM newest_workflows WHERE tenant = '*' AND workflow_id = :workflow_id),
    (
        SELECT count(*) FROM shared_runs
        WHERE shared_runs.workflow_id = :workflow_id AND shared_runs.tenant = known.tenant
    )
FROM known ORDER BY known.tenant

-- name: put_tenant
-- Replaces a tenant's configuration.
INSERT INTO tenants (tenant, config) VALUES (:tenant, :config)
ON CONFLICT (tenant) DO UPDATE SET config = excluded.config

-- name: delete_pins
-- Removes a tenant's pins.
DELETE FROM pins WHERE tenant = :tenant

-- name: put_pin
-- Pins a version of a shared workflow.
INSERT INTO pins (tenant, workflow_id, version) VALUES (:tenant, :workflow_id, :version)

-- name: delete_tenant
-- Removes a tenant's configuration. Answers (tenant) if there was one.
DELETE FROM tenants WHERE tenant = :tenant RETURNING tenant

-- name: read_tenant
-- Answers (config).
SELECT config FROM tenants WHERE tenant = :tenant

-- name: list_tenants
-- Answers (tenant, config), by name, after :after.
SELECT tenant, config FROM tenants WHERE tenant > :after ORDER BY tenant LIMIT :limit

-- name: list_standings
-- Answers (tenant, config, active, queued, seen_at), by name, after :after: of tenants that are configured,
-- use a slot or have started a run since :since.
WITH picked AS (
    SELECT tenant FROM tenants WHERE tenant > :after
    UNION SELECT tenant FROM accounts
    WHERE tenant > :after AND (active > 0 OR seen_at >= :since)
    ORDER BY tenant LIMIT :limit
)
SELECT picked.tenant, tenants.config, accounts.active, accounts.queued, accounts.seen_at
FROM picked
    LEFT JOIN tenants ON tenants.tenant = picked.tenant
    LEFT JOIN accounts ON accounts.tenant = picked.tenant

-- name: standings
-- Answers (tenant, config, active, queued, seen_at) of :tenants, a JSON array.
SELECT asked.value, tenants.config, accounts.active, accounts.queued, accounts.seen_at
FROM json_each(:tenants) AS asked
    LEFT JOIN tenants ON tenants.tenant = asked.value
    LEFT JOIN accounts ON accounts.tenant = asked.value

-- name: read_document
-- Answers (value, revision).
SELECT value, revision FROM documents WHERE kind = :kind AND name = :name

-- name: put_document
-- Writes a document under the revision given.
INSERT INTO documents (kind, name, revision, value) VALUES (:kind, :name, :revision, :value)
ON CONFLICT (kind, name) DO UPDATE SET revision = excluded.revision, value = excluded.value

-- name: list_documents
-- Answers (name, value, revision), by name, after :after.
SELECT name, value, revision FROM documents
WHERE kind = :kind AND name > :after ORDER BY name LIMIT :limit

-- name: delete_document
-- Removes a document.
DELETE FROM documents WHERE kind = :kind AND name = :name
