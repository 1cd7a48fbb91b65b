-- accept: accept results for jobs of one run, each independently.
-- KEYS   run inbox out jobs outbox rows open deadlines budgets reservations
-- ARGV   1 run id  2 the outbox row is due in so many ms  3 the only tenant, or ''
--        then for each result: job id, fence, worker id, event as JSON without step and item,
--        usage by budget as MessagePack or ''
-- ANSWER for each result: 'accepted' 'repeated' 'unknown_job' 'already_finished' 'stale_fence'
-- USES   time text budgets jobs retired results inbox
local answer, due, only = {}, now + tonumber(ARGV[2]), ARGV[3]
for i = 4, #ARGV, 5 do
  local job_id, fence = ARGV[i], tonumber(ARGV[i + 1])
  local job, work = read_job(job_id)
  if job and not is_of(job_id, job, only) then
    answer[#answer + 1] = 'unknown_job'
  elseif is_held(job, fence) then
    end_job(job_id, job, work, ARGV[i + 2], ARGV[i + 4])
    local entry_id = 'result:' .. job_id .. '#' .. whole(fence)
    put(ARGV[1], entry_id, ARGV[i + 3], due, job.step, job.item)
    answer[#answer + 1] = 'accepted'
  elseif job then
    answer[#answer + 1] = 'stale_fence'
  else
    local state, last_fence, last_work = unpack_retired(redis.call('HGET', key.jobs, job_id))
    if not state or (only ~= '' and tenant_of(last_work) ~= only) then
      answer[#answer + 1] = 'unknown_job'
    elseif state ~= 'finished' then
      answer[#answer + 1] = 'stale_fence'
    else
      answer[#answer + 1] = last_fence == fence and 'repeated' or 'already_finished'
    end
  end
end
return answer
