-- put_workflow: store a version of a workflow, unless it is the newest one already.
-- KEYS   versions workflows names known
-- ARGV   1 workflow id  2 workflow as JSON  3 tenant
-- ANSWER the version
-- USES   time
local version = tonumber(redis.call('HGET', key.versions, ARGV[1]) or '0')
if version > 0 then
  local packed = redis.call('HGET', key.workflows, whole(version) .. ':' .. ARGV[1])
  if cmsgpack.unpack(packed)[2] == ARGV[2] then
    return version
  end
end
version = version + 1
redis.call('HSET', key.workflows, whole(version) .. ':' .. ARGV[1], cmsgpack.pack({now, ARGV[2]}))
redis.call('HSET', key.versions, ARGV[1], version)
redis.call('ZADD', key.names, 0, ARGV[1])
redis.call('ZADD', key.known, 0, ARGV[3])
return version
