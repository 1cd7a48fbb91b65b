-- forget: remove expired idempotency keys in each of several shards.
-- KEYS   keys* aging*
-- ARGV   1 how many of each shard at most
-- ANSWER for each shard: how many were removed
-- USES   time text
local answer = {}
for i = 1, #KEYS, 2 do
  local names, at = KEYS[i], KEYS[i + 1]
  local old = redis.call('ZRANGEBYSCORE', at, 0, whole(now), 'LIMIT', 0, ARGV[1])
  many('HDEL', names, old)
  many('ZREM', at, old)
  answer[#answer + 1] = #old
end
return answer
