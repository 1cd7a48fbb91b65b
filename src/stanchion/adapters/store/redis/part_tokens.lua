-- part tokens: the tokens of one pool of a topic limit.
--   uses time; keys tokens token_order token_rate
--   drop_expired()              removes expired tokens
--   has(token)                  whether the token is there
--   put(token, ttl)             adds a token after all others, or extends it
--   remove(token)               removes a token; 1 if it was there
--   used(rate)                  the time up to which the rate is used, not before now
--   wait(rate, used_until)      how long until the rate allows a token; 0 if it does now
--   keep(at, ms)                keeps a key for so long at least
local function keep(at, ms)
  if redis.call('PTTL', at) < ms then
    redis.call('PEXPIRE', at, whole(ms))
  end
end

local function drop_expired()
  for _, token in ipairs(redis.call('ZRANGEBYSCORE', key.tokens, '-inf', whole(now))) do
    redis.call('ZREM', key.tokens, token)
    redis.call('ZREM', key.token_order, token)
  end
end

local function has(token)
  return redis.call('ZSCORE', key.token_order, token)
end

local function put(token, ttl)
  if not has(token) then
    local last = redis.call('ZREVRANGE', key.token_order, 0, 0, 'WITHSCORES')[2] or '0'
    redis.call('ZADD', key.token_order, whole(tonumber(last) + 1), token)
  end
  redis.call('ZADD', key.tokens, whole(now + ttl), token)
  keep(key.tokens, ttl + 60000)
  keep(key.token_order, ttl + 60000)
end

local function remove(token)
  redis.call('ZREM', key.tokens, token)
  return redis.call('ZREM', key.token_order, token)
end

-- core.admission.Rate
local function used(rate)
  local used_until = tonumber(redis.call('GET', key.token_rate) or '0')
  if used_until > now + math.max(1, rate) * 1000 / rate + 1 then
    return now -- the clock was set back
  end
  return math.max(used_until, now)
end

local function wait(rate, used_until)
  local burst = math.max(1, rate) * 1000 / rate
  return math.max(0, math.ceil(used_until + 1000 / rate - burst - now - 1e-6))
end
