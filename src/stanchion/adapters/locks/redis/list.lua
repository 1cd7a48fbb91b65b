-- list: the held locks of one shard. Read only.
-- KEYS   held ends
-- ARGV   1 prefix, or the whole name  2 'prefix' or 'name'
-- ANSWER for each: name, fence, ms until it ends
-- USES   time
local answer = {}

local function add(name, ends)
  answer[#answer + 1] = name
  answer[#answer + 1] = whole(cmsgpack.unpack(redis.call('HGET', key.held, name))[2])
  answer[#answer + 1] = ends - now
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
