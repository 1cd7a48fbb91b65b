-- confirm: remove an outbox row if the inbox is empty and the row has not changed.
-- KEYS   inbox outbox rows promoted
-- ARGV   1 run id  2 number and tenant
-- ANSWER nothing
if redis.call('HGET', key.rows, ARGV[1]) == ARGV[2] and redis.call('EXISTS', key.inbox) == 0
    and redis.call('HEXISTS', key.promoted, ARGV[1]) == 0 then
  redis.call('ZREM', key.outbox, ARGV[1])
  redis.call('HDEL', key.rows, ARGV[1])
end
