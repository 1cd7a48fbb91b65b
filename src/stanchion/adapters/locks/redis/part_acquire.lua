-- part acquire: acquire() takes a lock that is free or that this token has already.
-- NEEDS  keys held ends fence, part time
-- ARGV   1 name  2 token  3 term in ms  4 not after, in this server's ms  5 floor
-- ANSWER {'granted', fence} {'held', ms until it ends} {'too_late'}
local function acquire()
  local name, token, floor = ARGV[1], ARGV[2], tonumber(ARGV[5])
  if now > tonumber(ARGV[4]) then
    return {'too_late'}
  end

  local fence, since, renewals = nil, now, 0
  local ends = tonumber(redis.call('ZSCORE', key.ends, name) or '0')
  if now < ends then
    local holder = cmsgpack.unpack(redis.call('HGET', key.held, name))
    if holder[1] ~= token then
      return {'held', ends - now}
    end
    if holder[2] > floor then
      -- ``held`` has two values more since 0.2: since when, in ms, and renewals.
      fence, since, renewals = holder[2], holder[3] or false, holder[4] or 0
    end
  end
  if not fence then
    -- core.lease.next_fence(previous, floor, server time). The previous fence is the highest of all
    -- names of this shard: it is above every fence of this name, without a record for each name.
    local previous = tonumber(redis.call('GET', key.fence) or '0')
    fence = math.max(previous + 1, floor + 1, now_us)
    redis.call('SET', key.fence, whole(fence))
  end
  redis.call('HSET', key.held, name, cmsgpack.pack({token, fence, since, renewals}))
  redis.call('ZADD', key.ends, whole(now + tonumber(ARGV[3])), name)

  -- Each call removes a few expired names, so that their number stays bounded.
  local late = redis.call('ZRANGEBYSCORE', key.ends, '-inf', whole(now), 'LIMIT', 0, 2)
  for _, gone in ipairs(late) do
    redis.call('ZREM', key.ends, gone)
    redis.call('HDEL', key.held, gone)
  end
  return {'granted', whole(fence)}
end
