-- delete_tenant: remove the configuration of a tenant; the defaults apply again.
-- KEYS   configs configured audit_log audit_log_of
-- KEYS   queue queue_ring queue_turns waiting queued promoted known counters active unfinished outbox rows listed
-- ARGV   1 tenant  2 audit entry (see part audit), or ''
--        3 the cap of a tenant without configuration, or ''
-- ANSWER 1; 0 if it was not configured
-- USES   time text audit queue
local before = redis.call('HGET', key.configs, ARGV[1])
if ARGV[2] ~= '' and before then
  write_audit(cmsgpack.unpack(ARGV[2]), 'config', before)
end
redis.call('ZREM', key.configured, ARGV[1])
local removed = redis.call('HDEL', key.configs, ARGV[1])
promote(ARGV[1], tonumber(ARGV[3]))
return removed
