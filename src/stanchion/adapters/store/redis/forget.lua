-- forget: remove idempotency keys whose time is over.
-- KEYS   keys aging
-- ARGV   1 how many at most
-- ANSWER nothing
-- USES   time
for _, name in ipairs(redis.call('ZRANGEBYSCORE', key.aging, 0, whole(now), 'LIMIT', 0, ARGV[1])) do
  redis.call('HDEL', key.keys, name)
  redis.call('ZREM', key.aging, name)
end
