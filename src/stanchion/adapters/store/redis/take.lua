-- take: due outbox rows, earliest first. Each is due again later unless confirmed.
-- KEYS   outbox rows
-- ARGV   1 how many at most  2 due again after so many ms
-- ANSWER for each row: run id, number and tenant, the time at which it was due
-- USES   time
local answer = {}
local taken = redis.call(
  'ZRANGEBYSCORE', key.outbox, '-inf', whole(now), 'WITHSCORES', 'LIMIT', 0, ARGV[1])
for i = 1, #taken, 2 do
  redis.call('ZADD', key.outbox, whole(now + tonumber(ARGV[2])), taken[i])
  answer[#answer + 1] = taken[i]
  answer[#answer + 1] = redis.call('HGET', key.rows, taken[i])
  answer[#answer + 1] = taken[i + 1]
end
return answer
