-- replica_summaries: read the summaries of all replicas.
-- KEYS   replicas replica_times
-- ANSWER the time of the store, in ms; then name, time of the report and summary of each replica
-- USES   time
local found = {now}
local times = redis.call('ZRANGE', key.replica_times, 0, -1, 'WITHSCORES')
for at = 1, #times, 2 do
  found[#found + 1] = times[at]
  found[#found + 1] = times[at + 1]
  found[#found + 1] = redis.call('HGET', key.replicas, times[at])
end
return found
