-- part audit: the audit log of the shard and of the tenant.
--   uses time; keys audit_log audit_log_of
--   write_audit(entry, …)   add an entry, with further fields in pairs
--     entry  for how many ms entries are kept, whether it has a tenant, the entry as JSON
-- A log that nothing is added to expires as a whole.
local function write_audit(entry, ...)
  local kept_ms, has_tenant, text = whole(entry[1]), entry[2], entry[3]
  local oldest = whole(now - entry[1])
  local id = redis.call('XADD', key.audit_log, 'MINID', '~', oldest, '*', 'entry', text, ...)
  redis.call('PEXPIRE', key.audit_log, kept_ms)
  if has_tenant then
    redis.call('XADD', key.audit_log_of, 'MINID', '~', oldest, id, 'entry', text, ...)
    redis.call('PEXPIRE', key.audit_log_of, kept_ms)
  end
end
