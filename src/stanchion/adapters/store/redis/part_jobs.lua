-- part jobs: jobs that are open, that is ready or leased. They lie in the shard.
--   keys open
--   read_job(job_id)          the job and what the worker gets, or nil
--   pack_job(job)
--   write_job(job_id, job)
-- Records are MessagePack: it keeps whole numbers whole.
local function read_job(job_id)
  local found = redis.call('HMGET', key.open, 's:' .. job_id, 'w:' .. job_id)
  if not found[1] then
    return nil
  end
  local v = cmsgpack.unpack(found[1])
  return {
    state = v[1], deliveries = v[2], fence = v[3], number = v[4], expires = v[5],
    worker = v[6], topic = v[7], step = v[8], item = v[9],
  }, found[2]
end

local function pack_job(job)
  return cmsgpack.pack({
    job.state, job.deliveries, job.fence, job.number, job.expires,
    job.worker, job.topic, job.step, job.item,
  })
end

local function write_job(job_id, job)
  redis.call('HSET', key.open, 's:' .. job_id, pack_job(job))
end
