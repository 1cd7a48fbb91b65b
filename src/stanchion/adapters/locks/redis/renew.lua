-- renew: restart the term if the token still has the lock.
-- KEYS   held ends
-- ARGV   1 name  2 token  3 term in ms
-- ANSWER 1; 0 if it has not
-- USES   time
local ends = tonumber(redis.call('ZSCORE', key.ends, ARGV[1]) or '0')
if now >= ends then
  return 0
end
local holder = cmsgpack.unpack(redis.call('HGET', key.held, ARGV[1]))
if holder[1] ~= ARGV[2] then
  return 0
end
holder[3], holder[4] = holder[3] or false, (holder[4] or 0) + 1
redis.call('HSET', key.held, ARGV[1], cmsgpack.pack(holder))
redis.call('ZADD', key.ends, whole(now + tonumber(ARGV[3])), ARGV[1])
return 1
