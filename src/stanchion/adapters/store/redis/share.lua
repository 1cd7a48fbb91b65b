-- share: add a version of a shared workflow to each of several shards, as the newest or an older one.
-- KEYS   shared_versions* shared_workflows* shared_names*
-- ARGV   1 workflow id  2 version  3 record
-- ANSWER for each shard: 1; 0 if another workflow has this version there
local id, version = ARGV[1], tonumber(ARGV[2])
local field = ARGV[2] .. ':' .. id
local answer = {}
for i = 1, #KEYS, 3 do
  local newest, records, names = KEYS[i], KEYS[i + 1], KEYS[i + 2]
  -- A version never changes: runs in this shard may have begun with it.
  redis.call('HSETNX', records, field, ARGV[3])
  local is_same = redis.call('HGET', records, field) == ARGV[3]
  if is_same and version > tonumber(redis.call('HGET', newest, id) or '0') then
    redis.call('HSET', newest, id, ARGV[2])
  end
  redis.call('ZADD', names, 0, id)
  answer[#answer + 1] = is_same and 1 or 0
end
return answer
