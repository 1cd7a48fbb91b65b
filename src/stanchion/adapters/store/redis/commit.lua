-- commit: write a transition, or return why not. Writes everything or nothing.
-- KEYS   run items out jobs inbox timeline
-- KEYS   ready ring turns counters open deadlines timers timers_of timer_turns outbox rows
-- KEYS   approvals asked asked_of
-- KEYS   active unfinished known finished keys aging configs shared_runs listed
-- KEYS   queue queue_ring queue_turns waiting queued promoted
-- KEYS   feed budgets reservations
-- ARGV   1  the commit, a MessagePack map: see part commit
-- ANSWER {'gone'} {'committed', version, promoted run, …} {'stale_fence', highest} {'conflict'}
-- USES   time text budgets ready jobs retired inbox promoted timers effects listed run queue commit
local ask = cmsgpack.unpack(ARGV[1])
local answer, version, highest = judge_commit(ask)
return answer or write_commit(ask, version, highest)
