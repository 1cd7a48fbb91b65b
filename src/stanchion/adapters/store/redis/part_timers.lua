-- part timers: the timers of a shard by their time, and once more by tenant.
--   uses text; keys timers timers_of timer_turns
--   set_timers(tenant, timers)      a list: due, run id and name of a timer, …
--   forget_timers(tenant, names)    removes those that are set; a name begins with the run id
--   line_of_timer(tenant, due, name)   its entry in ``timers_of``
-- ``timer_turns`` has for each tenant a time at which its next timer is due, or an earlier one; if
-- that is over, its last turn: see due_turns and fire. Processes of earlier versions do not know it,
-- nor ``timers_of``.
local function line_of_timer(tenant, due, name)
  return sized(tenant) .. padded(due) .. name
end

local function set_timers(tenant, timers)
  local lines, first = {}, nil
  for i = 1, #timers, 2 do
    local due = tonumber(timers[i])
    lines[i], lines[i + 1] = 0, line_of_timer(tenant, due, timers[i + 1])
    first = math.min(first or due, due)
  end
  if first then
    many('ZADD', key.timers, timers)
    many('ZADD', key.timers_of, lines)
    redis.call('ZADD', key.timer_turns, 'LT', whole(first), tenant)
  end
end

local function forget_timers(tenant, names)
  local lines = {}
  for _, name in ipairs(names) do
    local due = redis.call('ZSCORE', key.timers, name)
    if due then
      lines[#lines + 1] = line_of_timer(tenant, tonumber(due), name)
    end
  end
  many('ZREM', key.timers, names)
  many('ZREM', key.timers_of, lines)
end
