-- renew: begin the terms of leases anew, of those that still stand.
-- KEYS   open deadlines
-- ARGV   1 term in ms, then for each lease: job id, fence
-- ANSWER for each lease: 1 renewed, 0 lost
-- USES   time jobs
local answer = {}
for i = 2, #ARGV, 2 do
  local job = read_job(ARGV[i])
  if job and job.state == 'leased' and job.fence == tonumber(ARGV[i + 1]) and now < job.expires then
    job.expires = now + tonumber(ARGV[1])
    write_job(ARGV[i], job)
    redis.call('ZADD', key.deadlines, whole(job.expires), ARGV[i])
    answer[#answer + 1] = 1
  else
    answer[#answer + 1] = 0
  end
end
return answer
