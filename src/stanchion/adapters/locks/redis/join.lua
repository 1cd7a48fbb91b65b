-- join: join the queue at its end, or renew the ticket.
-- KEYS   ends queue tickets
-- ARGV   1 name  2 token  3 channel  4 the ticket's term in ms
-- ANSWER {number of waiters ahead, ms until the next check without a bell}
-- USES   time line
first_in_line()
local mine = ARGV[3] .. ' ' .. ARGV[2]
if not redis.call('ZSCORE', key.queue, mine) then
  local last = redis.call('ZRANGE', key.queue, -1, -1, 'WITHSCORES')
  redis.call('ZADD', key.queue, whole((tonumber(last[2]) or 0) + 1), mine)
end
redis.call('ZADD', key.tickets, whole(now + tonumber(ARGV[4])), mine)

-- The keys of an abandoned queue expire with the last ticket.
local last_ends = redis.call('ZRANGE', key.tickets, -1, -1, 'WITHSCORES')[2]
redis.call('PEXPIREAT', key.queue, last_ends)
redis.call('PEXPIREAT', key.tickets, last_ends)

local ahead = redis.call('ZRANK', key.queue, mine)
local ends = ends_of(ARGV[1])
if ends > 0 then
  return {ahead, ends - now}
end
if ahead == 0 then
  return {0, 0}
end
local first = redis.call('ZRANGE', key.queue, 0, 0)[1]
return {ahead, redis.call('ZSCORE', key.tickets, first) - now}
