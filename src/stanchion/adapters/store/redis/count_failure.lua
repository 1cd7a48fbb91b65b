-- count_failure: raise and read how often applying an inbox entry failed.
-- KEYS   inbox
-- ARGV   1 entry id
-- ANSWER how often; 0 if the entry is not there
local packed = redis.call('HGET', key.inbox, ARGV[1])
if not packed then
  return 0
end
local entry = cmsgpack.unpack(packed)
entry[2] = entry[2] + 1
redis.call('HSET', key.inbox, ARGV[1], cmsgpack.pack(entry))
return entry[2]
