-- post: add an event to the inbox of a run, once per entry id.
-- KEYS   run inbox outbox rows audit_log audit_log_of
-- ARGV   1 run id  2 entry id  3 event as JSON  4 audit entry (see part audit), or ''
-- ANSWER 'unknown' 'finished' 'repeated' 'posted'
-- USES   time inbox audit
local run = redis.call('HMGET', key.run, 'stamp', 'closed')
if not run[1] then
  return 'unknown'
end
if run[2] then
  return 'finished'
end
if not put(ARGV[1], ARGV[2], ARGV[3], now) then
  return 'repeated'
end
if ARGV[4] ~= '' then
  write_audit(cmsgpack.unpack(ARGV[4]))
end
return 'posted'
