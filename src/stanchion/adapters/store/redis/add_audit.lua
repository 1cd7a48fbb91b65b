-- add_audit: write an audit entry whose change is not in this store.
-- KEYS   audit_log audit_log_of audit_once
-- ARGV   1 the entry: see part audit  2 the entries with the same text here are one, or ''
-- ANSWER 1; 0 if it was written before
-- USES   time audit
local entry = cmsgpack.unpack(ARGV[1])
if ARGV[2] ~= '' then
  redis.call('ZREMRANGEBYSCORE', key.audit_once, '-inf', whole(now - entry[1]))
  if redis.call('ZADD', key.audit_once, 'NX', whole(now), ARGV[2]) == 0 then
    return 0
  end
end
write_audit(entry)
return 1
