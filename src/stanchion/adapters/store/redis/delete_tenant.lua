-- delete_tenant: remove the configuration of a tenant; the defaults apply again.
-- KEYS   configs configured audit_log audit_log_of
-- ARGV   1 tenant  2 audit entry (see part audit), or ''
-- ANSWER 1; 0 if it was not configured
-- USES   time audit
local before = redis.call('HGET', key.configs, ARGV[1])
if ARGV[2] ~= '' and before then
  write_audit(cmsgpack.unpack(ARGV[2]), 'config', before)
end
redis.call('ZREM', key.configured, ARGV[1])
return redis.call('HDEL', key.configs, ARGV[1])
