-- lost: whether leases of open jobs hold.
-- KEYS   open
-- ARGV   1 the only tenant, or ''  then for each lease: job id, fence
-- ANSWER for each lease: 'held' 'stale_fence' 'expired' 'unknown_job', or 'retired' if the job is
--        not open: then see retired.lua
-- USES   time jobs
local answer, only = {}, ARGV[1]
for i = 2, #ARGV, 2 do
  local job, is = read_state(ARGV[i]), 'expired'
  if not job then
    is = 'retired'
  elseif not is_of(ARGV[i], job, only) then
    is = 'unknown_job'
  elseif job.fence ~= tonumber(ARGV[i + 1]) then
    is = 'stale_fence'
  elseif job.state == 'leased' and now < job.expires then
    is = 'held'
  end
  answer[#answer + 1] = is
end
return answer
