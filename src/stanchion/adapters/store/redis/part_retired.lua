-- part retired: jobs that are finished, revoked or dead. They are stored per run.
--   keys open out jobs
--   retire(job_id, job, work, state, worker)    moves an open job here
--   pack_retired(job, work, state, worker)
--   unpack_retired(packed)                      state, fence, work; nil for nil
local function pack_retired(job, work, state, worker)
  return cmsgpack.pack({state, job.deliveries, job.fence, worker, work})
end

local function unpack_retired(packed)
  if not packed then
    return nil
  end
  local v = cmsgpack.unpack(packed)
  return v[1], v[3], v[5]
end

local function retire(job_id, job, work, state, worker)
  redis.call('HSET', key.jobs, job_id, pack_retired(job, work, state, worker))
  redis.call('HDEL', key.open, 's:' .. job_id, 'w:' .. job_id)
  redis.call('HDEL', key.out, 'j:' .. job_id)
end
