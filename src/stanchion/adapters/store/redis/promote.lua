-- promote: give free slots of a tenant to waiting runs.
-- KEYS   queue queue_ring queue_turns waiting queued promoted counters configs
-- KEYS   active unfinished known outbox rows listed
-- ARGV   1 tenant  2 the cap of a tenant without configuration, or ''
-- ANSWER the ids of these runs
-- USES   time text queue
return promote(ARGV[1], tonumber(ARGV[2]))
