-- raise_level: raise the level in the format of the data, from which on older processes refuse it.
-- KEYS   format audit_log audit_log_of
-- ARGV   1 level  2 the format with this level  3 audit entry (see part audit), or ''
-- ANSWER the level
-- USES   time audit
local level = tonumber(string.match(redis.call('GET', key.format) or '1', '^%d+'))
if level >= tonumber(ARGV[1]) then
  return level
end
redis.call('SET', key.format, ARGV[2])
if ARGV[3] ~= '' then
  write_audit(cmsgpack.unpack(ARGV[3]))
end
return tonumber(ARGV[1])
