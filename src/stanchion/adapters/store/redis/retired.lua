-- retired: how jobs of one run ended that are not open any more.
-- KEYS   run jobs open out
-- ARGV   1 the only tenant, or ''  then for each lease: job id, fence
-- ANSWER for each lease: {state of the job, status of the run, 1 if the fence was its last, else 0};
--        {} for an unknown job
-- USES   jobs retired
local answer, only = {}, ARGV[1]
local status = redis.call('HGET', key.run, 'status')
for i = 2, #ARGV, 2 do
  local state, fence, work = unpack_retired(redis.call('HGET', key.jobs, ARGV[i]))
  if not state or not status or (only ~= '' and tenant_of(work) ~= only) then
    answer[#answer + 1] = {}
  else
    answer[#answer + 1] = {state, status, fence == tonumber(ARGV[i + 1]) and 1 or 0}
  end
end
return answer
