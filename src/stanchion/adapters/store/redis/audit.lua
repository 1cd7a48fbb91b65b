-- audit: compare a tenant's count of slots with its unfinished runs, and perhaps correct it.
-- KEYS   active unfinished known configs counters outbox rows listed audit_log audit_log_of
-- KEYS   queue queue_ring queue_turns waiting queued promoted
-- ARGV   1 tenant  2 audit entry (see part audit), or ''  3 whether to correct: 1 or 0
--        4 the cap of a tenant without configuration, or ''
-- ANSWER the count, the number of unfinished runs
-- USES   time text audit queue
local mine = sized(ARGV[1])
local counted = tonumber(redis.call('HGET', key.active, ARGV[1]) or '0')
local actual = redis.call('ZLEXCOUNT', key.unfinished, '[' .. mine, '(' .. mine .. '\255')
if counted ~= actual and ARGV[3] == '1' then
  redis.call('HSET', key.active, ARGV[1], actual)
  if ARGV[2] ~= '' then
    write_audit(cmsgpack.unpack(ARGV[2]), 'slots', whole(counted) .. ' ' .. whole(actual))
  end
end
if ARGV[3] == '1' then
  promote(ARGV[1], tonumber(ARGV[4]))
end
return {counted, actual}
