-- put_workflow: store a version of a workflow, unless it is the newest one already.
-- KEYS   versions workflows names authors audit_log audit_log_of
-- ARGV   1 workflow id  2 workflow as JSON  3 tenant  4 audit entry (see part audit), or ''
-- ANSWER the version
-- USES   time audit
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
redis.call('ZADD', key.authors, 0, ARGV[3])
if ARGV[4] ~= '' then
  write_audit(cmsgpack.unpack(ARGV[4]), 'version', whole(version))
end
return version
