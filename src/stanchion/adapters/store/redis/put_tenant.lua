-- put_tenant: replace the configuration of a tenant.
-- KEYS   configs configured known audit_log audit_log_of
-- KEYS   queue queue_ring queue_turns waiting queued promoted counters active unfinished outbox rows listed
-- ARGV   1 tenant  2 MessagePack: cap or false, rate or false, the configuration as JSON,
--        the versions of shared workflows that it pins, its budgets: name, limit, window, …; if it
--        queues also true, how many runs may wait, and for how many ms
--        3 audit entry (see part audit), or ''
-- ANSWER nothing
-- USES   time text audit queue
local before = redis.call('HGET', key.configs, ARGV[1])
if ARGV[3] ~= '' and before ~= ARGV[2] then
  write_audit(cmsgpack.unpack(ARGV[3]), 'config', before or '')
end
redis.call('HSET', key.configs, ARGV[1], ARGV[2])
redis.call('ZADD', key.configured, 0, ARGV[1])
redis.call('ZADD', key.known, 0, ARGV[1])
promote(ARGV[1], nil)
