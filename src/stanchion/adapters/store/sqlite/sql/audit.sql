-- The audit log and the receipts of refusals: rows are added, and removed when they are too old;
-- they are never changed.

-- name: add_audit
-- Adds an entry, unless one with the same ``once`` exists. Its time is not before the newest one's.
INSERT INTO audit_log (at, tenant, actor, action, once, body)
VALUES (
    max(:now, ifnull((SELECT max(at) FROM audit_log), 0)), :tenant, :actor, :action, :once, :body
)
ON CONFLICT (once) DO NOTHING

-- name: list_audit
-- Answers (entry, at, body) of the entries since a time and before a place, newest first.
SELECT entry, at, body FROM audit_log
WHERE at >= :since AND (at, entry) < (:at, :entry)
ORDER BY at DESC, entry DESC LIMIT :limit

-- name: list_audit_of_tenant
-- Like list_audit, of one tenant.
SELECT entry, at, body FROM audit_log
WHERE tenant = :name AND at >= :since AND (at, entry) < (:at, :entry)
ORDER BY at DESC, entry DESC LIMIT :limit

-- name: list_audit_of_actor
-- Like list_audit, of one actor.
SELECT entry, at, body FROM audit_log
WHERE actor = :name AND at >= :since AND (at, entry) < (:at, :entry)
ORDER BY at DESC, entry DESC LIMIT :limit

-- name: list_audit_of_action
-- Like list_audit, of one action.
SELECT entry, at, body FROM audit_log
WHERE action = :name AND at >= :since AND (at, entry) < (:at, :entry)
ORDER BY at DESC, entry DESC LIMIT :limit

-- name: forget_audit
-- Removes entries that were written before a time.
DELETE FROM audit_log
WHERE entry IN (SELECT entry FROM audit_log WHERE at < :before ORDER BY at LIMIT :limit)

-- name: put_receipts
-- Adds a batch of receipts, unless it was added before.
INSERT INTO receipts (id, tenant, at, count, body) VALUES (:id, :tenant, :at, :count, :body)
ON CONFLICT (id) DO NOTHING

-- name: receipt_counts
-- Answers (batch, count) of a tenant's batches, newest first.
SELECT batch, count FROM receipts WHERE tenant = :tenant ORDER BY batch DESC

-- name: drop_receipts
-- Removes a tenant's batches up to one of them.
DELETE FROM receipts WHERE tenant = :tenant AND batch <= :batch

-- name: forget_receipts
-- Removes batches that were written before a time.
DELETE FROM receipts
WHERE batch IN (SELECT batch FROM receipts WHERE at < :before ORDER BY at LIMIT :limit)

-- name: receipt_batches
-- Answers (batch, body), newest first.
SELECT batch, body FROM receipts WHERE batch <= :last ORDER BY batch DESC LIMIT :limit

-- name: receipt_batches_of_tenant
-- Like receipt_batches, of one tenant.
SELECT batch, body FROM receipts
WHERE tenant = :tenant AND batch <= :last ORDER BY batch DESC LIMIT :limit
