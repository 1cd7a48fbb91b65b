-- list: the held locks of one shard. Read only.
-- KEYS   held ends
-- ARGV   1 prefix, or the whole name  2 'prefix' or 'name'
-- ANSWER for each: name, token, fence, ms until it ends, since when it is held, in ms, or '', renewals
-- USES   time
local answer = {}

local function add(name, ends)
  local holder = cmsgpack.unpack(redis.call('HGET', key.held, name))
  answer[#answer + 1] = name
  answer[#answer + 1] = holder[1]
  answer[#answer + 1] = whole(holder[2])
  answer[#answer + 1] = ends - now
  answer[#answer + 1] = holder[3] or ''
  answer[#answer + 1] = holder[4] or 0
end

if ARGV[2] == 'name' then
  local ends = tonumber(redis.call('ZSCORE', key.ends, ARGV[1]) or '0')
  if now < ends then
    add(ARGV[1], ends)
  end
  return answer
end
local held = redis.call('ZRANGEBYSCORE', key.ends, '(' .. whole(now), '+inf', 'WITHSCORES')
for i = 1, #held, 2 do
  if string.sub(held[i], 1, #ARGV[1]) == ARGV[1] then
    add(held[i], tonumber(held[i + 1]))
  end
end
return answer
