-- part inbox: events for a run, and the outbox row that says so.
--   uses time; keys run inbox outbox rows
--   put(run_id, entry_id, event, due, step, item)   false if the entry lies there already
--     step, item: added to the event when it is read, for what the sender of a result does not know
--   settle_row(run_id)     the row goes when nothing is left in the inbox
local function put(run_id, entry_id, event, due, step, item)
  if redis.call('HEXISTS', key.inbox, entry_id) == 1 then
    return false
  end
  -- One number orders the inbox and tells rows apart. It stays with the run, so it never repeats.
  local number = redis.call('HINCRBY', key.run, 'number', 1)
  redis.call('HSET', key.inbox, entry_id,
    cmsgpack.pack({number, 0, step or false, item or false, event}))
  -- ``whose`` is the run's place among its tenant's runs, 39 characters, and the tenant.
  local tenant = string.sub(redis.call('HGET', key.run, 'whose'), 40)
  redis.call('HSET', key.rows, run_id, whole(number) .. ' ' .. tenant)
  -- LT: a row that is there already becomes due earlier, never later.
  redis.call('ZADD', key.outbox, 'LT', whole(due), run_id)
  return true
end

local function settle_row(run_id)
  if redis.call('EXISTS', key.inbox) == 0 then
    redis.call('ZREM', key.outbox, run_id)
    redis.call('HDEL', key.rows, run_id)
  end
end
