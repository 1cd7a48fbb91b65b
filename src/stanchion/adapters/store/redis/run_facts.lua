-- run_facts: a run and all that it waits for, read atomically.
-- KEYS   run inbox out buried
-- KEYS   open ready timers outbox rows letters promoted queue queue_ring queue_turns waiting
-- ARGV   1 run id  2 jobs at most  3 timers at most  4 dead letters at most
-- ANSWER the time, {fields of the run}, {entries of the inbox}, due time of the outbox row or '',
--        {id, state, jobs ahead or '' of each open job}, {due time, content of each timer},
--        {dead letters}, {position in the queue, rank, fairness key} or {}
-- USES   time text jobs inbox promoted place
local run_id = ARGV[1]
apply_promotion(run_id)
local fields = redis.call('HGETALL', key.run)
if #fields == 0 then
  return {}
end
-- ``whose`` is the run's position in its tenant's list, 39 characters, and the tenant.
local tenant = string.sub(redis.call('HGET', key.run, 'whose'), 40)
local jobs, timers, letters, first = {}, {}, {}, {}
local out = redis.call('HGETALL', key.out)
for i = 1, #out, 2 do
  local kind, name = string.sub(out[i], 1, 1), string.sub(out[i], 3)
  if kind == 'j' and #jobs < 3 * tonumber(ARGV[2]) then
    local packed = redis.call('HGET', key.open, 's:' .. name)
    local job = unpack_job(packed)
    jobs[#jobs + 1] = name
    jobs[#jobs + 1] = packed
    jobs[#jobs + 1] = ''
    local known = first[job.step]
    if job.state == 'ready' and (not known or job.number < known.number) then
      job.id, job.place = name, #jobs
      first[job.step] = job
    end
  elseif kind == 't' and #timers < 2 * tonumber(ARGV[3]) then
    timers[#timers + 1] = redis.call('ZSCORE', key.timers, run_id .. name)
    timers[#timers + 1] = out[i + 1]
  end
end
-- The same entries as those of ``queued`` in part_ready.
for _, job in pairs(first) do
  local queue = sized(job.topic) .. sized(tenant)
  jobs[job.place] = redis.call('ZLEXCOUNT', key.ready, '[' .. queue,
    '(' .. queue .. padded(job.number) .. job.id)
end
for _, letter_id in ipairs(redis.call('SMEMBERS', key.buried)) do
  if #letters < tonumber(ARGV[4]) then
    letters[#letters + 1] = redis.call('HGET', key.letters, letter_id)
  end
end
local next_try = redis.call('ZSCORE', key.outbox, run_id) or ''
return {now, fields, redis.call('HGETALL', key.inbox), next_try, jobs, timers, letters,
  queue_place(tenant, run_id)}
