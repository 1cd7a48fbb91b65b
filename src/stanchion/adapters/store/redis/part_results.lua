-- part results: results of workers, which end their jobs.
--   uses text budgets retired; keys deadlines, and those of budgets and retired
--   is_held(job, fence)                   whether the job is leased with this fence
--   end_job(job_id, job, work, worker, usage)    ends a job by the result of its holder
--     usage  by budget as MessagePack, or ''
--   end_jobs(ended)    the same for several, each {job_id, job, work, worker, usage}: a command costs
--                      more than what it writes
local function is_held(job, fence)
  return job and job.state == 'leased' and job.fence == tonumber(fence)
end

local function end_job(job_id, job, work, worker, usage)
  if usage ~= '' then
    charge_usage(string.match(job_id, '^[^:]*'), job, cmsgpack.unpack(usage))
  end
  redis.call('ZREM', key.deadlines, job_id)
  retire(job_id, job, work, 'finished', worker)
end

local function end_jobs(ended)
  local ids, past, open, out = {}, {}, {}, {}
  for i, each in ipairs(ended) do
    local job_id, job, work, worker, usage = unpack(each)
    if usage ~= '' then
      charge_usage(string.match(job_id, '^[^:]*'), job, cmsgpack.unpack(usage))
    end
    ids[i] = job_id
    past[2 * i - 1], past[2 * i] = job_id, pack_retired(job, work, 'finished', worker)
    open[2 * i - 1], open[2 * i] = 's:' .. job_id, 'w:' .. job_id
    out[i] = 'j:' .. job_id
  end
  many('ZREM', key.deadlines, ids)
  many('HSET', key.jobs, past)
  many('HDEL', key.open, open)
  many('HDEL', key.out, out)
end
