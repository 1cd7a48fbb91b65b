-- due: the due members of several indexes by this server's clock, earliest first. Read only.
-- KEYS   index*
-- ARGV   1 how many of each index at most
-- ANSWER for each index: {name, time, …}
-- USES   time
local answer = {}
for i, at in ipairs(KEYS) do
  answer[i] = redis.call(
    'ZRANGEBYSCORE', at, '-inf', whole(now), 'WITHSCORES', 'LIMIT', 0, ARGV[1])
end
return answer
