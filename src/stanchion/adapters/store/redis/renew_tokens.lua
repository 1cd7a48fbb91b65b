-- renew_tokens: extend tokens of a pool, each under a new name or the same.
-- KEYS   tokens token_order token_rate
-- ARGV   1 term in ms  2 how many there may be, or ''
--        then for each token: its name, its new name
-- ANSWER time, then the new names of those that were extended or taken
-- USES   time tokens
local ttl, limit = tonumber(ARGV[1]), tonumber(ARGV[2])
local answer = {now}

local function renew(held, name)
  local place = has(held)
  if place and held ~= name then
    remove(held)
    redis.call('ZADD', key.token_order, place, name)
    return true
  end
  local ahead = redis.call('ZRANK', key.token_order, name) or redis.call('ZCARD', key.token_order)
  return not limit or ahead < limit
end

drop_expired()
for i = 3, #ARGV, 2 do
  if renew(ARGV[i], ARGV[i + 1]) then
    put(ARGV[i + 1], ttl)
    answer[#answer + 1] = ARGV[i + 1]
  end
end
return answer
