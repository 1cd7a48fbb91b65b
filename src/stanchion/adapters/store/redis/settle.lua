-- settle: accept results of one run and write the transition that applies them, or nothing at all.
-- KEYS   run items out jobs inbox timeline
-- KEYS   ready ring turns counters open deadlines timers timers_of timer_turns outbox rows
-- KEYS   approvals asked asked_of
-- KEYS   active unfinished known finished keys aging configs shared_runs listed
-- KEYS   queue queue_ring queue_turns waiting queued promoted
-- KEYS   feed budgets reservations
-- ARGV   1  the commit, a MessagePack map: see part commit
--        then for each result: job id, fence, worker id, usage by budget as MessagePack or ''
-- ANSWER {'gone'} {'committed', version, promoted run, …} {'stale_fence', highest} {'conflict'}
--        {'inbox'} if it has entries that the commit does not apply, {'job'} if a result is not from
--        the holder of its job
-- USES   time text budgets ready jobs retired results inbox promoted timers effects listed run queue commit
local ask = cmsgpack.unpack(ARGV[1])
local answer, version, highest = judge_commit(ask)
if answer then
  return answer
end
local others = redis.call('HLEN', key.inbox)
for _, entry_id in ipairs(ask.applied) do
  others = others - redis.call('HEXISTS', key.inbox, entry_id)
end
if others > 0 then
  return {'inbox'}
end
local ids, ended, seen = {}, {}, {}
for i = 2, #ARGV, 4 do
  ids[#ids + 1] = ARGV[i]
end
for n, found in ipairs(read_jobs(ids)) do
  local at, job_id = 4 * n - 2, ids[n]
  if seen[job_id] or not is_held(found[1], ARGV[at + 1]) then
    return {'job'}
  end
  seen[job_id] = true
  ended[n] = {job_id, found[1], found[2], ARGV[at + 2], ARGV[at + 3]}
end
end_jobs(ended)
return write_commit(ask, version, highest)
