-- part run: the record of a run, written by admission and by every commit.
--   stamped(version, fence, nonce)       the stamp and fence as text
--   unstamped(text)                      version, fence, nonce
--   uses time text budgets effects; keys run items timeline feed inbox outbox rows active unfinished
--        finished keys aging shared_runs budgets reservations, and those of effects
--   become(ask, stamp, is_new)   writes the run after the transition. ``ask`` has
--     run, tenant            the ids
--     fields, dropped        of the run's hash: name, value, …; names
--     items                  name, value, …
--     effects                see part effects
--     timeline               entries as JSON texts
--     is_finished            and then also
--     finished_at, key_ttl   milliseconds
local function stamped(version, fence, nonce)
  return whole(version) .. ' ' .. whole(fence) .. ' ' .. nonce
end

local function unstamped(text)
  local version, fence, nonce = string.match(text, '^(%d+) (%d+) (.*)$')
  return tonumber(version), tonumber(fence), nonce
end

local function record(ask)
  if #ask.timeline > 0 then
    many('RPUSH', key.timeline, ask.timeline)
    -- The entries are JSON texts: joined they form a JSON list without another encoding.
    redis.call('XADD', key.feed, 'MAXLEN', '~', 10000, '*',
      'run', ask.run, 'lines', '[' .. table.concat(ask.timeline, ',') .. ']')
  end
end

local function close(ask)
  if redis.call('HSETNX', key.run, 'closed', 1) == 0 then
    return
  end
  if redis.call('ZREM', key.unfinished, sized(ask.tenant) .. ask.run) == 1 then
    redis.call('HINCRBY', key.active, ask.tenant, -1)
  end
  local found = redis.call('HMGET', key.run, 'key', 'shared', 'budgets')
  local name, shared = found[1], found[2]
  if found[3] then
    settle_budgets(ask.run)
  end
  if shared then
    redis.call('ZREM', key.shared_runs, shared)
  end
  local packed = name and redis.call('HGET', key.keys, name)
  if packed then
    local forgotten_at = whole(now + ask.key_ttl)
    local known = cmsgpack.unpack(packed)
    redis.call('HSET', key.keys, name, cmsgpack.pack({forgotten_at, known[2], known[3]}))
    redis.call('ZADD', key.aging, forgotten_at, name)
  end
  redis.call('ZADD', key.finished, whole(ask.finished_at or now), ask.run .. ask.tenant)
  redis.call('DEL', key.inbox)
  redis.call('ZREM', key.outbox, ask.run)
  redis.call('HDEL', key.rows, ask.run)
end

local function become(ask, stamp, is_new)
  ask.fields[#ask.fields + 1] = 'stamp'
  ask.fields[#ask.fields + 1] = stamp
  many('HSET', key.run, ask.fields)
  many('HDEL', key.run, ask.dropped)
  many('HSET', key.items, ask.items)
  carry_out(ask.run, ask.tenant, ask.effects, is_new)
  record(ask)
  if ask.is_finished then
    close(ask)
  end
end
