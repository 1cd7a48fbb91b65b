-- acquire_in_turn: like acquire, but a lock with waiters is granted only to the first of them.
-- KEYS   held ends fence queue tickets
-- ARGV   1 to 5 as acquire  6 channel
-- ANSWER as acquire
-- USES   time acquire line
local first = first_in_line()
if not first then
  return acquire()
end
local mine = ARGV[6] .. ' ' .. ARGV[2]
if first ~= mine and ends_of(ARGV[1]) == 0 then
  return {'held', redis.call('ZSCORE', key.tickets, first) - now}
end
local answer = acquire()
if answer[1] == 'granted' then
  redis.call('ZREM', key.queue, mine)
  redis.call('ZREM', key.tickets, mine)
end
return answer
