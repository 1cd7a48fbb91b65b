-- ready: count the ready jobs of one shard.
-- KEYS   ready ring
-- ARGV   topics
-- ANSWER for each topic: tenants in the ring, jobs
-- USES   text
local answer = {}
for _, topic in ipairs(ARGV) do
  local low, high = '[' .. sized(topic), '(' .. sized(topic) .. '\255'
  answer[#answer + 1] = redis.call('ZLEXCOUNT', key.ring, low, high)
  answer[#answer + 1] = redis.call('ZLEXCOUNT', key.ready, low, high)
end
return answer
