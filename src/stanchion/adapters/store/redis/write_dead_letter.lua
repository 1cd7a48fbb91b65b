-- write_dead_letter: move an inbox entry that cannot be applied to the dead letters.
-- KEYS   run inbox buried outbox rows promoted counters letters dead dead_of
-- ARGV   1 run id  2 tenant  3 entry id  4 the entry as it was read  5 letter id  6 letter
-- ANSWER the time of the dead letter; nil if the entry is gone or was replaced
-- USES   time text inbox promoted letters
apply_promotion(ARGV[1])
-- The comparison ignores the count of failures, which may have risen since the entry was read.
local packed = redis.call('HGET', key.inbox, ARGV[3])
if not packed or cmsgpack.unpack(packed)[1] ~= cmsgpack.unpack(ARGV[4])[1] then
  return nil
end
redis.call('HDEL', key.inbox, ARGV[3])
settle_row(ARGV[1])
add_letter(ARGV[2], ARGV[5], ARGV[6])
return now
