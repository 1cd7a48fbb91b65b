-- due: what is due by this server's clock, earliest first, without touching it.
-- KEYS   index
-- ARGV   1 how many at most
-- ANSWER name, time, …
-- USES   time
return redis.call('ZRANGEBYSCORE', key.index, '-inf', whole(now), 'WITHSCORES', 'LIMIT', 0, ARGV[1])
