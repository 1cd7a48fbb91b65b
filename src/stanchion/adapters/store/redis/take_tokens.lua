-- take_tokens: take tokens of a pool, as many as there are.
-- KEYS   tokens token_order token_rate
-- ARGV   1 term in ms  2 how many there may be, or ''  3 how many per second, or ''
--        then the names of the tokens
-- ANSWER time, tokens in the pool, 1 if the rate was the reason for fewer, time until the next in
--        ms, then the names of those granted
-- USES   time tokens
local ttl, limit, rate = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local granted, new, seen = {}, {}, {}
drop_expired()
local running = redis.call('ZCARD', key.token_order)
for i = 4, #ARGV do
  local token = ARGV[i]
  if not seen[token] then
    seen[token] = true
    if has(token) then
      put(token, ttl)
      granted[#granted + 1] = token
    else
      new[#new + 1] = token
    end
  end
end

-- core.topic_limits.grant_tokens
local count, is_rate_spent, used_until = #new, 0, 0
if limit then
  count = math.min(count, math.max(0, limit - running))
end
if rate then
  used_until = used(rate)
  local cost = 1000 / rate
  local allowed = math.floor((now + cost * math.max(1, rate) - used_until) / cost + 1e-6)
  if allowed < count then
    count, is_rate_spent = math.max(0, allowed), 1
  end
  if count > 0 then
    used_until = used_until + count * cost
    redis.call('SET', key.token_rate, string.format('%.17g', used_until))
    redis.call('PEXPIRE', key.token_rate, whole(math.ceil(used_until - now) + 60000))
  end
end
for i = 1, count do
  put(new[i], ttl)
  granted[#granted + 1] = new[i]
end
return {now, running + count, is_rate_spent, rate and wait(rate, used_until) or 0, unpack(granted)}
