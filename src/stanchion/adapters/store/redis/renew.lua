-- renew: extend the leases that have not expired.
-- KEYS   open deadlines budgets reservations
-- ARGV   1 term in ms  2 the only tenant, or ''  3 the time after which nothing is extended, or ''
--        then for each lease: job id, fence, new progress as JSON or '', usage by budget as
--        MessagePack or ''
-- ANSWER for each lease: 1 renewed, 0 lost; nothing if it is too late
-- USES   time text budgets jobs
local answer, only = {}, ARGV[2]
if ARGV[3] ~= '' and now > tonumber(ARGV[3]) then
  return answer
end
for i = 4, #ARGV, 4 do
  local job = read_state(ARGV[i])
  if job and job.state == 'leased' and job.fence == tonumber(ARGV[i + 1]) and now < job.expires
      and is_of(ARGV[i], job, only) then
    job.expires = now + tonumber(ARGV[1])
    if ARGV[i + 2] ~= '' then
      job.progress = ARGV[i + 2]
    end
    if ARGV[i + 3] ~= '' then
      charge_usage(string.match(ARGV[i], '^[^:]*'), job, cmsgpack.unpack(ARGV[i + 3]))
    end
    write_job(ARGV[i], job)
    redis.call('ZADD', key.deadlines, whole(due(job)), ARGV[i])
    answer[#answer + 1] = 1
  else
    answer[#answer + 1] = 0
  end
end
return answer
