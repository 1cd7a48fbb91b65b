-- part results: results of workers, which end their jobs.
--   uses retired; keys deadlines, and those of retired
--   is_held(job, fence)                   whether the job is leased with this fence
--   end_job(job_id, job, work, worker)    ends a job by the result of its holder
local function is_held(job, fence)
  return job and job.state == 'leased' and job.fence == tonumber(fence)
end

local function end_job(job_id, job, work, worker)
  redis.call('ZREM', key.deadlines, job_id)
  retire(job_id, job, work, 'finished', worker)
end
