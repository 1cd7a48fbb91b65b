-- delete_tenant: remove the configuration of a tenant; the defaults apply again.
-- KEYS   configs configured
-- ARGV   1 tenant
-- ANSWER 1; 0 if it was not configured
redis.call('ZREM', key.configured, ARGV[1])
return redis.call('HDEL', key.configs, ARGV[1])
