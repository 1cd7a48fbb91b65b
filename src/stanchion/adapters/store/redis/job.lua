-- job: one job, open or not.
-- KEYS   open jobs
-- ARGV   1 job id
-- ANSWER {state of the open job, its content} {the job that is no longer open} {}
local open = redis.call('HMGET', key.open, 's:' .. ARGV[1], 'w:' .. ARGV[1])
if open[1] then
  return open
end
local retired = redis.call('HGET', key.jobs, ARGV[1])
return retired and {retired} or {}
