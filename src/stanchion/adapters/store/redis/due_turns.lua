-- due_turns: due timers of each shard, the earliest of tenants in turn.
-- KEYS   turns_and_timers*
--          of each shard: timer_turns timers_of
-- ARGV   1 how many of each shard  2 how many tenants of it are looked at
-- ANSWER for each shard: {place among those of its tenant, time of its turn, due, tenant, name, …}
-- USES   time text
-- A tenant that has no due timers goes to the time of its next one. The others keep their places:
-- one goes behind all others when a timer of it fires, see script fire.
local answer = {}
local most = tonumber(ARGV[1])
for i = 1, #KEYS, 2 do
  local found, left = {}, most
  local waiting = redis.call(
    'ZRANGEBYSCORE', KEYS[i], '-inf', whole(now), 'WITHSCORES', 'LIMIT', 0, ARGV[2])

  local function look(n, skip, count)
    local tenant, turn = waiting[n], tonumber(waiting[n + 1])
    local mine = sized(tenant)
    local lines = redis.call('ZRANGEBYLEX', KEYS[i + 1],
      '[' .. mine, '(' .. mine .. padded(now + 1), 'LIMIT', skip, count)
    for place, line in ipairs(lines) do
      found[#found + 1] = skip + place
      found[#found + 1] = turn
      found[#found + 1] = whole(tonumber(string.sub(line, #mine + 1, #mine + 16)))
      found[#found + 1] = tenant
      found[#found + 1] = string.sub(line, #mine + 17)
    end
    left = left - #lines
    if #lines == 0 and skip == 0 then
      local line = redis.call('ZRANGEBYLEX', KEYS[i + 1],
        '[' .. mine, '(' .. mine .. '\255', 'LIMIT', 0, 1)[1]
      if line then
        redis.call('ZADD', KEYS[i], tonumber(string.sub(line, #mine + 1, #mine + 16)), tenant)
      else
        redis.call('ZREM', KEYS[i], tenant)
      end
    end
    return #lines == count
  end

  local share, more = math.max(1, math.floor(2 * most / math.max(2, #waiting))), {}
  for n = 1, #waiting, 2 do
    if left > 0 and look(n, 0, math.min(share, left)) then
      more[#more + 1] = n
    end
  end
  for _, n in ipairs(more) do
    if left > 0 then
      look(n, share, left)
    end
  end
  answer[#answer + 1] = found
end
return answer
