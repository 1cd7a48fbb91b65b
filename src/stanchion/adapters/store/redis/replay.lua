-- replay: remove a dead letter and post an event to its run, unless the run has ended.
-- KEYS   run inbox buried outbox rows counters letters dead dead_of audit_log audit_log_of
-- ARGV   1 run id  2 tenant  3 letter id  4 entry id, empty to post nothing  5 event as JSON
--        6 audit entry (see part audit), or ''
-- ANSWER 1; 0 if there is no such letter
-- USES   time text inbox letters audit
if not remove_letter(ARGV[2], ARGV[3]) then
  return 0
end
if ARGV[4] ~= '' and redis.call('HEXISTS', key.run, 'closed') == 0 then
  put(ARGV[1], ARGV[4], ARGV[5], now)
end
if ARGV[6] ~= '' then
  write_audit(cmsgpack.unpack(ARGV[6]))
end
return 1
