-- adopt: add a run of an earlier version to the lists.
-- KEYS   run listed seen seen_names
-- ARGV   1 the names of the run in its lists, a MessagePack list  2 what lists show of it
-- ANSWER 1; 0 if the run is gone
-- USES   text listed
local run = redis.call('HMGET', key.run, 'status', 'whose')
if not run[1] then
  return 0
end
local place, tenant = string.sub(run[2], 1, 39), string.sub(run[2], 40)
local fields = {}
enlist(cmsgpack.unpack(ARGV[1]), tenant, place, run[1], fields)
redis.call('HSET', key.run, unpack(fields))
redis.call('HSET', key.run, 'about', ARGV[2])
local created = string.sub(place, 1, 16)
if created > (redis.call('HGET', key.seen, tenant) or '') then
  redis.call('HSET', key.seen, tenant, created)
  redis.call('ZADD', key.seen_names, 0, tenant)
end
return 1
