-- ready_tenants: the tenants of one shard with ready jobs, in the order of their turns.
-- KEYS   ready ring turns
-- ARGV   1 the only tenant, or ''  2 how many tenants at most  3 the number of topics
--        then the topics, then the tenants to leave out
-- ANSWER for each tenant and topic: tenant, number of jobs
-- USES   text
local only, limit, topics = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local left_out, answer, tenants, found = {}, {}, {}, 0
for i = 4 + topics, #ARGV do
  left_out[ARGV[i]] = true
end

-- Whether the tenant has jobs of the topic.
local function add(topic, tenant)
  local queue = sized(topic) .. sized(tenant)
  local jobs = redis.call('ZLEXCOUNT', key.ready, '[' .. queue, '(' .. queue .. '\255')
  if jobs == 0 or left_out[tenant] or (found == limit and not tenants[tenant]) then
    return jobs > 0
  end
  if not tenants[tenant] then
    tenants[tenant], found = true, found + 1
  end
  answer[#answer + 1] = tenant
  answer[#answer + 1] = jobs
  return true
end

-- Tenants whose jobs were revoked or leased by name are still in the ring. They leave it here, or
-- those behind them would not be found.
local function look(topic, place)
  local tenant = string.sub(place, #sized(topic) + 17)
  if not add(topic, tenant) then
    redis.call('ZREM', key.ring, place)
    redis.call('HDEL', key.turns, sized(topic) .. sized(tenant))
  end
end

for i = 4, 3 + topics do
  local topic = ARGV[i]
  if only ~= '' then
    add(topic, only)
  else
    local low, high = '[' .. sized(topic), '(' .. sized(topic) .. '\255'
    local most = limit + #ARGV - 3 - topics
    local places
    repeat
      places = redis.call('ZRANGEBYLEX', key.ring, low, high, 'LIMIT', 0, most)
      for _, place in ipairs(places) do
        look(topic, place)
        low = '(' .. place
      end
    until #places < most or found == limit
  end
end
return answer
