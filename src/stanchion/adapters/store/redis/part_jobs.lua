-- part jobs: open jobs, which are ready or leased. They are stored per shard.
--   keys open
--   read_job(job_id)          the state of the job and its content, or nil
--   read_jobs(job_ids)        the same of many jobs, in their order: {state or nil, content} of each
--   read_state(job_id)        the state only: the content may be large
--   tenant_of(work)           the tenant of the job
--   is_of(job_id, job, only)  whether it belongs to this tenant; '' is any
--   pack_job(job)
--   write_job(job_id, job)
--   due(job)                  when a leased job is due: its lease or its attempt ends
-- Records are MessagePack, which keeps integers exact.
local function unpack_job(packed)
  if not packed then
    return nil
  end
  local v = cmsgpack.unpack(packed)
  return {
    state = v[1], deliveries = v[2], fence = v[3], number = v[4], expires = v[5],
    worker = v[6], topic = v[7], step = v[8], item = v[9], progress = v[10] or '',
    tenant = v[11],
    -- How long the attempt may take, and when that is over, once it was leased. 0 is no limit.
    timeout = v[12] or 0, ends = v[13] or 0,
    -- What was reported as used under its fence, by budget.
    usage = v[14] or nil,
  }
end

local function read_job(job_id)
  local found = redis.call('HMGET', key.open, 's:' .. job_id, 'w:' .. job_id)
  return unpack_job(found[1]), found[2]
end

local function read_jobs(job_ids)
  local answer = {}
  -- unpack uses the stack of Lua: two fields of each of 500 jobs.
  for first = 1, #job_ids, 500 do
    local fields, last = {}, math.min(first + 499, #job_ids)
    for i = first, last do
      fields[#fields + 1] = 's:' .. job_ids[i]
      fields[#fields + 1] = 'w:' .. job_ids[i]
    end
    local found = redis.call('HMGET', key.open, unpack(fields))
    for i = first, last do
      local at = 2 * (i - first) + 1
      answer[i] = {unpack_job(found[at]), found[at + 1]}
    end
  end
  return answer
end

local function read_state(job_id)
  return unpack_job(redis.call('HGET', key.open, 's:' .. job_id))
end

-- Matches the head of a job's JSON: ids and tenants contain no quotes. The input is not read.
local function tenant_of(work)
  return string.match(work, '^{"id":"[^"]*","run_id":"[^"]*","tenant":"([^"]*)"')
end

local function is_of(job_id, job, only)
  if only == '' then
    return true
  end
  -- A job written by an older version has no tenant.
  job.tenant = job.tenant or tenant_of(redis.call('HGET', key.open, 'w:' .. job_id))
  return job.tenant == only
end

local function pack_job(job)
  return cmsgpack.pack({
    job.state, job.deliveries, job.fence, job.number, job.expires,
    job.worker, job.topic, job.step, job.item, job.progress or '', job.tenant,
    job.timeout or 0, job.ends or 0, job.usage or false,
  })
end

local function due(job)
  return job.ends > 0 and math.min(job.ends, job.expires) or job.expires
end

local function write_job(job_id, job)
  redis.call('HSET', key.open, 's:' .. job_id, pack_job(job))
end
