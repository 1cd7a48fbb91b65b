-- count_failure: count a failure of applying an inbox entry.
-- KEYS   inbox
-- ARGV   1 entry id
-- ANSWER the new count; 0 if there is no such entry
local packed = redis.call('HGET', key.inbox, ARGV[1])
if not packed then
  return 0
end
local entry = cmsgpack.unpack(packed)
entry[2] = entry[2] + 1
redis.call('HSET', key.inbox, ARGV[1], cmsgpack.pack(entry))
return entry[2]
