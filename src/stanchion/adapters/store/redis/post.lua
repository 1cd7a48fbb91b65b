-- post: add an event to the inbox of a run, once per entry id.
-- KEYS   run inbox outbox rows
-- ARGV   1 run id  2 entry id  3 event as JSON
-- ANSWER 'unknown' 'finished' 'repeated' 'posted'
-- USES   time inbox
local run = redis.call('HMGET', key.run, 'stamp', 'closed')
if not run[1] then
  return 'unknown'
end
if run[2] then
  return 'finished'
end
return put(ARGV[1], ARGV[2], ARGV[3], now) and 'posted' or 'repeated'
