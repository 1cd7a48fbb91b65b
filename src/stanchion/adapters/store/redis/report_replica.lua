-- report_replica: replace the summary of a replica, and remove summaries that are too old.
-- KEYS   replicas replica_times
-- ARGV   1 replica  2 summary as JSON  3 how long a summary is kept, in ms
-- ANSWER the time of the store, in ms
-- USES   time
local expired = redis.call('ZRANGEBYSCORE', key.replica_times, '-inf', whole(now - tonumber(ARGV[3])))
for _, name in ipairs(expired) do
  redis.call('ZREM', key.replica_times, name)
  redis.call('HDEL', key.replicas, name)
end
redis.call('HSET', key.replicas, ARGV[1], ARGV[2])
redis.call('ZADD', key.replica_times, whole(now), ARGV[1])
return now
