-- audit: compare a tenant's count of slots with its unfinished runs, and correct it.
-- KEYS   active unfinished
-- ARGV   1 tenant
-- ANSWER the count, the number of unfinished runs
-- USES   text
local mine = sized(ARGV[1])
local counted = tonumber(redis.call('HGET', key.active, ARGV[1]) or '0')
local actual = redis.call('ZLEXCOUNT', key.unfinished, '[' .. mine, '(' .. mine .. '\255')
if counted ~= actual then
  redis.call('HSET', key.active, ARGV[1], actual)
end
return {counted, actual}
