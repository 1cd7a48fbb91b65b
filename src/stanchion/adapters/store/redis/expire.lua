-- expire: end an expired lease: make its job ready again, or a dead letter.
-- KEYS   run inbox out jobs buried
-- KEYS   outbox rows ready ring turns counters open deadlines letters dead dead_of
-- ARGV   1 run id  2 tenant  3 job id  4 fence of the lease
--        and, if the job was delivered too often: 5 letter id  6 letter  7 entry id  8 event
-- ANSWER 1; 0 if the lease was ended already or has not expired
-- USES   time text ready jobs retired inbox letters
local run_id, tenant, job_id = ARGV[1], ARGV[2], ARGV[3]
local job, work = read_job(job_id)
if not job or job.state ~= 'leased' or job.fence ~= tonumber(ARGV[4]) or now < job.expires then
  return 0
end
redis.call('ZREM', key.deadlines, job_id)
if ARGV[5] then
  retire(job_id, job, work, 'dead', '')
  add_letter(tenant, ARGV[5], ARGV[6])
  put(run_id, ARGV[7], ARGV[8], now)
else
  job.state, job.worker, job.expires, job.progress = 'ready', '', 0, ''
  job.number = numbers(1) + 1
  write_job(job_id, job)
  redis.call('ZADD', key.ready, 0, queued(job_id, job.number, job.topic, tenant))
  join(job.topic, tenant)
end
return 1
