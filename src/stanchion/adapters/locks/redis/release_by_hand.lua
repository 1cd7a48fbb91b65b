-- release_by_hand: free a lock of any holder, with a note that is written if it was held.
-- KEYS   held ends notes
-- ARGV   1 name  2 ''  3 note id  4 note
-- ANSWER 1; 0 if it was free
-- USES   time release
local packed = redis.call('HGET', key.held, ARGV[1])
if release() == 0 then
  return 0
end
local fence = cmsgpack.unpack(packed)[2]
redis.call('HSET', key.notes, ARGV[3], cmsgpack.pack({ARGV[1], ARGV[4], whole(fence)}))
return 1
