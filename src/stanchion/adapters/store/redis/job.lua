-- job: one job, wherever it is.
-- KEYS   open jobs
-- ARGV   1 job id
-- ANSWER {state of the open job, what the worker gets} {the job that is not open any more} {}
local open = redis.call('HMGET', key.open, 's:' .. ARGV[1], 'w:' .. ARGV[1])
if open[1] then
  return open
end
local retired = redis.call('HGET', key.jobs, ARGV[1])
return retired and {retired} or {}
