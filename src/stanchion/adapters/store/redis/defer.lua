-- defer: make an outbox row due later, if it has not changed.
-- KEYS   outbox rows
-- ARGV   1 run id  2 number and tenant  3 due in so many ms
-- ANSWER nothing
-- USES   time
if redis.call('HGET', key.rows, ARGV[1]) == ARGV[2] then
  redis.call('ZADD', key.outbox, whole(now + tonumber(ARGV[3])), ARGV[1])
end
