-- expire: end an expired lease: make its job ready again, or a dead letter; or end an attempt.
-- KEYS   run inbox out jobs buried
-- KEYS   outbox rows ready ring turns counters open deadlines letters dead dead_of
-- ARGV   1 run id  2 tenant  3 job id  4 fence of the lease
--        5 entry id  6 event, if the attempt has taken too long
--        and, if the job was delivered too often: 7 letter id  8 letter  9 entry id  10 event
-- ANSWER 1; 2 if the attempt has taken too long: the job is revoked, leased or ready;
--        0 if the lease was ended already or has not expired
-- USES   time text ready jobs retired inbox letters
local run_id, tenant, job_id = ARGV[1], ARGV[2], ARGV[3]
local job, work = read_job(job_id)
if not job or job.fence ~= tonumber(ARGV[4]) then
  return 0
end
if job.ends > 0 and now >= job.ends then
  if job.state == 'ready' then
    redis.call('ZREM', key.ready, queued(job_id, job.number, job.topic, tenant))
  end
  redis.call('ZREM', key.deadlines, job_id)
  retire(job_id, job, work, 'revoked', '')
  put(run_id, ARGV[5], ARGV[6], now)
  return 2
end
if job.state ~= 'leased' or now < job.expires then
  return 0
end
redis.call('ZREM', key.deadlines, job_id)
if ARGV[7] then
  retire(job_id, job, work, 'dead', '')
  add_letter(tenant, ARGV[7], ARGV[8])
  put(run_id, ARGV[9], ARGV[10], now)
else
  job.state, job.worker, job.expires, job.progress = 'ready', '', 0, ''
  job.number = numbers(1) + 1
  write_job(job_id, job)
  redis.call('ZADD', key.ready, 0, queued(job_id, job.number, job.topic, tenant))
  join(job.topic, tenant)
  if job.ends > 0 then
    redis.call('ZADD', key.deadlines, whole(job.ends), job_id)
  end
end
return 1
