-- commit: write a transition, or return why not. Writes everything or nothing.
-- KEYS   run items out jobs inbox timeline
-- KEYS   ready ring turns counters open deadlines timers outbox rows
-- KEYS   approvals asked asked_of
-- KEYS   active unfinished finished keys aging shared_runs listed
-- KEYS   feed budgets reservations
-- ARGV   1  the commit, a MessagePack map: see part commit
-- ANSWER {'gone'} {'committed', version} {'stale_fence', highest} {'conflict'}
-- USES   time text budgets ready jobs retired inbox effects listed run commit
local ask = cmsgpack.unpack(ARGV[1])
local answer, version, highest = judge_commit(ask)
return answer or write_commit(ask, version, highest)
