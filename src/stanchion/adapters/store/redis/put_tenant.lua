-- put_tenant: replace what a tenant may do.
-- KEYS   configs configured known
-- ARGV   1 tenant  2 MessagePack: cap or false, rate or false, all of it as JSON
-- ANSWER nothing
redis.call('HSET', key.configs, ARGV[1], ARGV[2])
redis.call('ZADD', key.configured, 0, ARGV[1])
redis.call('ZADD', key.known, 0, ARGV[1])
