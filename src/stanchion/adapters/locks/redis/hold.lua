-- hold: acquire for operators, with a note that is written if the lock is granted.
-- KEYS   held ends fence notes
-- ARGV   1 to 5 as of acquire  6 note id  7 note
-- ANSWER as of acquire
-- USES   time acquire
local answer = acquire()
if answer[1] == 'granted' then
  redis.call('HSET', key.notes, ARGV[6], cmsgpack.pack({ARGV[1], ARGV[7], answer[2]}))
end
return answer
