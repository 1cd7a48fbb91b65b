-- part results: results of workers, which end their jobs.
--   uses budgets retired; keys deadlines, and those of budgets and retired
--   is_held(job, fence)                   whether the job is leased with this fence
--   end_job(job_id, job, work, worker, usage)    ends a job by the result of its holder
--     usage  by budget as MessagePack, or ''
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
