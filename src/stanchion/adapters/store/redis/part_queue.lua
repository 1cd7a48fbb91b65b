-- part queue: the runs that wait for a slot of their tenant, in the order of core.queue.
--   uses time text
--   keys queue queue_ring queue_turns waiting queued promoted counters configs
--        active unfinished known outbox rows listed
--   enqueue(tenant, run_id, rank, fair, place)   add a run. rank: 9 less its priority, as a digit;
--                                                fair: its fairness key; place: in its tenant's list
--   leave_queue(tenant, run_id)                  remove a run, if it waits
--   promote(tenant, limit)                       give free slots to waiting runs, PROMOTED_MAX at
--                                                most; their ids.
--                                                limit: the cap of a tenant without configuration
--   queue_length(tenant)                         how many wait
-- A run waits in ``queue`` under its tenant, rank, fairness key and number. A key with waiting runs
-- is in ``queue_ring`` under its turn. A promotion writes keys of the shard alone, because those of
-- the promoted run are not declared: ``promoted`` tells scripts of that run, see part promoted.
local PROMOTED_MAX = 100 -- core.queue.PROMOTED_AT_ONCE_MAX

local function queue_length(tenant)
  return tonumber(redis.call('HGET', key.queued, tenant) or '0')
end

local function enqueue(tenant, run_id, rank, fair, place)
  local number = padded(redis.call('HINCRBY', key.counters, 'queue', 1))
  local line = sized(tenant) .. rank
  redis.call('ZADD', key.queue, 0, line .. sized(fair) .. number .. run_id)
  if redis.call('HSETNX', key.queue_turns, line .. fair, number) == 1 then
    redis.call('ZADD', key.queue_ring, 0, line .. number .. fair)
  end
  redis.call('HSET', key.waiting, run_id, cmsgpack.pack({rank, fair, number, place}))
  redis.call('HINCRBY', key.queued, tenant, 1)
end

local function leave_queue(tenant, run_id, is_served)
  local packed = redis.call('HGET', key.waiting, run_id)
  if not packed then
    return nil
  end
  local rank, fair, number, place = unpack(cmsgpack.unpack(packed))
  local line = sized(tenant) .. rank
  local mine = line .. sized(fair)
  redis.call('HDEL', key.waiting, run_id)
  redis.call('ZREM', key.queue, mine .. number .. run_id)
  local is_last = redis.call('ZLEXCOUNT', key.queue, '[' .. mine, '(' .. mine .. '\255') == 0
  if is_last or is_served then
    local turn = redis.call('HGET', key.queue_turns, line .. fair)
    redis.call('ZREM', key.queue_ring, line .. turn .. fair)
    redis.call('HDEL', key.queue_turns, line .. fair)
  end
  if is_served and not is_last then
    local turn = padded(redis.call('HINCRBY', key.counters, 'queue', 1))
    redis.call('HSET', key.queue_turns, line .. fair, turn)
    redis.call('ZADD', key.queue_ring, 0, line .. turn .. fair)
  end
  if redis.call('HINCRBY', key.queued, tenant, -1) <= 0 then
    redis.call('HDEL', key.queued, tenant)
  end
  return place
end

local function take_slot(tenant, run_id)
  redis.call('ZADD', key.unfinished, 0, sized(tenant) .. run_id)
  if redis.call('HINCRBY', key.active, tenant, 1) == 1 then
    redis.call('ZADD', key.known, 0, tenant)
  end
end

local function promote(tenant, limit)
  local promoted = {}
  if redis.call('HEXISTS', key.queued, tenant) == 0 then
    return promoted
  end
  local config = redis.call('HGET', key.configs, tenant)
  if config then
    limit = cmsgpack.unpack(config)[1]
  end
  local active = tonumber(redis.call('HGET', key.active, tenant) or '0')
  local mine = sized(tenant)
  while #promoted < PROMOTED_MAX and (not limit or active < limit) do
    local head = redis.call('ZRANGEBYLEX', key.queue_ring,
      '[' .. mine, '(' .. mine .. '\255', 'LIMIT', 0, 1)[1]
    if not head then
      break
    end
    -- After the tenant come the rank, one digit, and the turn, sixteen.
    local runs = string.sub(head, 1, #mine + 1) .. sized(string.sub(head, #mine + 18))
    local first = redis.call('ZRANGEBYLEX', key.queue,
      '[' .. runs, '(' .. runs .. '\255', 'LIMIT', 0, 1)[1]
    local run_id = string.sub(first, #runs + 17)
    local place = leave_queue(tenant, run_id, true)
    take_slot(tenant, run_id)
    redis.call('HSET', key.promoted, run_id, 1)
    -- The names are those of part listed.
    redis.call('ZREM', key.listed, 's' .. mine .. 'queued:' .. place, 'Squeued:' .. place)
    redis.call('ZADD', key.listed, 0, 's' .. mine .. 'pending:' .. place, 0, 'Spending:' .. place)
    -- An event of the run may have a row already, with the higher number.
    redis.call('HSETNX', key.rows, run_id, '0 ' .. tenant)
    redis.call('ZADD', key.outbox, 'LT', whole(now), run_id)
    promoted[#promoted + 1] = run_id
    active = active + 1
  end
  return promoted
end
