-- put_tenant: replace the configuration of a tenant.
-- KEYS   configs configured known audit_log audit_log_of
-- ARGV   1 tenant  2 MessagePack: cap or false, rate or false, the configuration as JSON,
--        the versions of shared workflows that it pins, and its budgets: name, limit, window, …
--        3 audit entry (see part audit), or ''
-- ANSWER nothing
-- USES   time audit
local before = redis.call('HGET', key.configs, ARGV[1])
if ARGV[3] ~= '' and before ~= ARGV[2] then
  write_audit(cmsgpack.unpack(ARGV[3]), 'config', before or '')
end
redis.call('HSET', key.configs, ARGV[1], ARGV[2])
redis.call('ZADD', key.configured, 0, ARGV[1])
redis.call('ZADD', key.known, 0, ARGV[1])
