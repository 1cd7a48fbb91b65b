-- part release: release() frees a lock if the token still has it. The highest fence is kept.
-- NEEDS  keys held ends, part time
-- ARGV   1 name  2 token, or '' for any holder (an operator's release)
-- ANSWER 1; 0 if it has not
local function release()
  local ends = tonumber(redis.call('ZSCORE', key.ends, ARGV[1]) or '0')
  if now >= ends then
    return 0
  end
  if ARGV[2] ~= '' and cmsgpack.unpack(redis.call('HGET', key.held, ARGV[1]))[1] ~= ARGV[2] then
    return 0
  end
  redis.call('ZREM', key.ends, ARGV[1])
  redis.call('HDEL', key.held, ARGV[1])
  return 1
end
