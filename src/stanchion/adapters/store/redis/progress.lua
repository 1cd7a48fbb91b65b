-- progress: the last reported progress of open jobs of one run.
-- KEYS   open
-- ARGV   job ids
-- ANSWER for each job: progress as JSON, or ''
-- USES   jobs
local answer = {}
for i = 1, #ARGV do
  local job = read_state(ARGV[i])
  answer[i] = job and job.progress or ''
end
return answer
