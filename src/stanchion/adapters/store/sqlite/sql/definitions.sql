-- Workflows by version, tenants, documents.

-- name: newest_workflow
-- Answers (workflow, version, created_at).
SELECT workflows.workflow, workflows.version, workflows.created_at
FROM newest_workflows JOIN workflows USING (tenant, workflow_id, version)
WHERE newest_workflows.tenant = :tenant AND newest_workflows.workflow_id = :workflow_id

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

-- name: put_tenant
-- Replaces a tenant's configuration.
INSERT INTO tenants (tenant, config) VALUES (:tenant, :config)
ON CONFLICT (tenant) DO UPDATE SET config = excluded.config

-- name: delete_tenant
-- Removes a tenant's configuration. Answers (tenant) if there was one.
DELETE FROM tenants WHERE tenant = :tenant RETURNING tenant

-- name: read_tenant
-- Answers (config).
SELECT config FROM tenants WHERE tenant = :tenant

-- name: list_tenants
-- Answers (tenant, config), by name, after :after.
SELECT tenant, config FROM tenants WHERE tenant > :after ORDER BY tenant LIMIT :limit

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
