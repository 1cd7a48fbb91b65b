-- leave: leave the queue. If the lock is free, the bell of the first waiter rings.
-- KEYS   ends queue tickets
-- ARGV   1 name  2 token  3 channel
-- ANSWER 1
-- USES   time line
local mine = ARGV[3] .. ' ' .. ARGV[2]
redis.call('ZREM', key.queue, mine)
redis.call('ZREM', key.tickets, mine)
local first = first_in_line()
if first and ends_of(ARGV[1]) == 0 then
  ring(first)
end
return 1
