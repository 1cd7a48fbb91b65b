-- part line: those who wait for a name.
-- NEEDS  keys ends queue tickets, part time
--          queue    sorted set   who waits, by order of arrival
--          tickets  sorted set   the same, by the end of their tickets
--        Whoever waits is written as '<channel> <token>': where to ring, and for whom.
--   ends_of(name)      when the holder's term ends; 0 if nobody has it
--   first_in_line()    who is next, without those whose tickets ran out; nil if nobody waits
--   ring(who)          rings the bell
local function ends_of(name)
  local ends = tonumber(redis.call('ZSCORE', key.ends, name) or '0')
  return now < ends and ends or 0
end

local function first_in_line()
  local first = redis.call('ZRANGE', key.queue, 0, 0)[1]
  if not first then
    return nil
  end
  for _, late in ipairs(redis.call('ZRANGEBYSCORE', key.tickets, '-inf', whole(now))) do
    redis.call('ZREM', key.queue, late)
    redis.call('ZREM', key.tickets, late)
  end
  return redis.call('ZRANGE', key.queue, 0, 0)[1]
end

local function ring(who)
  local cut = string.find(who, ' ', 1, true)
  -- A user who may not publish still gets the turns right: those who wait look now and then.
  redis.pcall('PUBLISH', string.sub(who, 1, cut - 1), string.sub(who, cut + 1))
end
