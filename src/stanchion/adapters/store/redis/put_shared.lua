-- put_shared: choose the version of a shared workflow; the newest one, if it is unchanged.
-- KEYS   shared_versions shared_workflows shared_names audit_log audit_log_of
-- ARGV   1 workflow id  2 workflow as JSON  3 the highest version in any shard
--        4 audit entry (see part audit), or ''
-- ANSWER version. The keys are those outside all shards.
-- USES   time audit
local id, version = ARGV[1], tonumber(redis.call('HGET', key.shared_versions, ARGV[1]) or '0')
local highest = tonumber(ARGV[3])
-- After a failover a shard may have versions that are lost here.
if version > 0 and version >= highest then
  local packed = redis.call('HGET', key.shared_workflows, whole(version) .. ':' .. id)
  if cmsgpack.unpack(packed)[2] == ARGV[2] then
    return version
  end
end
version = math.max(version, highest) + 1
local packed = cmsgpack.pack({now, ARGV[2]})
redis.call('HSET', key.shared_workflows, whole(version) .. ':' .. id, packed)
redis.call('HSET', key.shared_versions, id, version)
redis.call('ZADD', key.shared_names, 0, id)
if ARGV[4] ~= '' then
  write_audit(cmsgpack.unpack(ARGV[4]), 'version', whole(version))
end
return version
