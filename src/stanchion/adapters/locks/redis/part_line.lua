-- part line: the queue of waiters for a lock.
-- NEEDS  keys ends queue tickets, part time
--          queue    sorted set   waiters, by order of arrival
--          tickets  sorted set   waiters, by the end of their tickets
--        A waiter is written as '<channel> <token>': where to publish, and for which token.
--   ends_of(name)      the end of the holder's term; 0 if the lock is free
--   first_in_line()    the first waiter with a valid ticket; nil if there is none
--   ring(who)          rings the bell of a waiter
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
  -- Without permission to publish the order is still right: waiters poll.
  redis.pcall('PUBLISH', string.sub(who, 1, cut - 1), string.sub(who, cut + 1))
end
