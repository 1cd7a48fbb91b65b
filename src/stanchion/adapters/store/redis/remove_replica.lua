-- remove_replica: remove the summary of a replica.
-- KEYS   replicas replica_times
-- ARGV   1 replica
-- ANSWER 1; 0 if there was none
redis.call('ZREM', key.replica_times, ARGV[1])
return redis.call('HDEL', key.replicas, ARGV[1])
