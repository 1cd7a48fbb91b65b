-- join: stand in line, at its end; or stay for longer.
-- KEYS   ends queue tickets
-- ARGV   1 name  2 token  3 channel  4 the ticket's term in ms
-- ANSWER {how many are ahead, ms until things may change without a bell}
-- USES   time line
first_in_line()
local mine = ARGV[3] .. ' ' .. ARGV[2]
if not redis.call('ZSCORE', key.queue, mine) then
  local last = redis.call('ZRANGE', key.queue, -1, -1, 'WITHSCORES')
  redis.call('ZADD', key.queue, whole((tonumber(last[2]) or 0) + 1), mine)
end
redis.call('ZADD', key.tickets, whole(now + tonumber(ARGV[4])), mine)

-- A line that everybody has deserted goes by itself, with the last ticket.
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
