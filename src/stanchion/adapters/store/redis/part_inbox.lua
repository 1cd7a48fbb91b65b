-- part inbox: the inbox of a run and its outbox row.
--   uses time; keys run inbox outbox rows
--   put(run_id, entry_id, event, due, step, item)   false if the entry is there already
--     step, item: added to the event when it is read, because a result does not contain them
--   add_entry(…)           as put, for a run that has a row; the number of the entry
--   settle_row(run_id)     removes the row if the inbox is empty
local function add_entry(entry_id, event, step, item)
  if redis.call('HEXISTS', key.inbox, entry_id) == 1 then
    return false
  end
  -- One number orders the inbox and versions the row. It is a field of the run: it never repeats.
  local number = redis.call('HINCRBY', key.run, 'number', 1)
  redis.call('HSET', key.inbox, entry_id,
    cmsgpack.pack({number, 0, step or false, item or false, event}))
  return number
end

local function put(run_id, entry_id, event, due, step, item)
  local number = add_entry(entry_id, event, step, item)
  if not number then
    return false
  end
  -- ``whose`` is the run's position in its tenant's list, 39 characters, and the tenant.
  local tenant = string.sub(redis.call('HGET', key.run, 'whose'), 40)
  redis.call('HSET', key.rows, run_id, whole(number) .. ' ' .. tenant)
  -- LT: an existing row becomes due earlier, never later.
  redis.call('ZADD', key.outbox, 'LT', whole(due), run_id)
  return true
end

local function settle_row(run_id)
  if redis.call('EXISTS', key.inbox) == 0 then
    redis.call('ZREM', key.outbox, run_id)
    redis.call('HDEL', key.rows, run_id)
  end
end
