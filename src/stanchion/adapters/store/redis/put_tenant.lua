-- put_tenant: replace the configuration of a tenant.
-- KEYS   configs configured known
-- ARGV   1 tenant  2 MessagePack: cap or false, rate or false, the configuration as JSON,
--        the versions of shared workflows that it pins
-- ANSWER nothing
redis.call('HSET', key.configs, ARGV[1], ARGV[2])
redis.call('ZADD', key.configured, 0, ARGV[1])
redis.call('ZADD', key.known, 0, ARGV[1])
