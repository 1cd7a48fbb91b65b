-- purge: remove a finished run with all its data.
-- KEYS   run items out jobs inbox timeline buried
-- KEYS   finished keys aging counters letters dead dead_of listed
-- KEYS   runs
-- ARGV   1 run id  2 tenant
-- ANSWER 1; 0 if it is gone already
-- USES   time text letters listed
local run_id, tenant = ARGV[1], ARGV[2]
if redis.call('ZREM', key.finished, run_id .. tenant) == 0 then
  return 0
end
for _, letter_id in ipairs(redis.call('SMEMBERS', key.buried)) do
  remove_letter(tenant, letter_id)
end
local run = redis.call('HMGET', key.run, 'key', 'whose')
-- The key may have expired and be bound to a later run.
if run[1] then
  local packed = redis.call('HGET', key.keys, run[1])
  if packed and cmsgpack.unpack(packed)[3] == run_id then
    redis.call('HDEL', key.keys, run[1])
    redis.call('ZREM', key.aging, run[1])
  end
end
delist()
redis.call('ZREM', key.runs, string.sub(run[2], 1, 39))
redis.call('UNLINK', key.run, key.items, key.out, key.jobs, key.inbox, key.timeline, key.buried)
return 1
