-- part place: the places of waiting runs. See part queue for what the keys hold.
--   uses text; keys queue queue_ring queue_turns waiting
--   queue_position(tenant, run_id)   1 for the next run; nil if it does not wait. The same as
--                                    core.queue.FairQueue.position.
--   queue_place(tenant, run_id)      {position, rank, fairness key}; {} if it does not wait
local KEYS_COUNTED_MAX = 100 -- core.queue.KEYS_COUNTED_MAX

local function queue_position(tenant, run_id)
  local packed = redis.call('HGET', key.waiting, run_id)
  if not packed then
    return nil
  end
  local rank, fair, number = unpack(cmsgpack.unpack(packed))
  local line = sized(tenant) .. rank
  local mine = line .. sized(fair)
  local before = redis.call('ZLEXCOUNT', key.queue, '[' .. mine, '(' .. mine .. number)
  local ahead = before + redis.call('ZLEXCOUNT', key.queue, '[' .. sized(tenant), '(' .. line)
  local of_line, after_line = '[' .. line, '(' .. line .. '\255'
  local fair_keys = redis.call('ZLEXCOUNT', key.queue_ring, of_line, after_line)
  if fair_keys > KEYS_COUNTED_MAX then
    local turn = redis.call('HGET', key.queue_turns, line .. fair)
    local earlier = redis.call('ZLEXCOUNT', key.queue_ring, of_line, '(' .. line .. turn)
    local others = redis.call('ZLEXCOUNT', key.queue, of_line, after_line)
      - redis.call('ZLEXCOUNT', key.queue, '[' .. mine, '(' .. mine .. '\255')
    return ahead + math.min(others, (fair_keys - 1) * before + earlier) + 1
  end
  local is_earlier = 1
  local ring = redis.call('ZRANGEBYLEX', key.queue_ring, of_line, after_line)
  for _, name in ipairs(ring) do
    local other = string.sub(name, #line + 17)
    if other == fair then
      is_earlier = 0
    else
      local theirs = line .. sized(other)
      local count = redis.call('ZLEXCOUNT', key.queue, '[' .. theirs, '(' .. theirs .. '\255')
      ahead = ahead + math.min(count, before + is_earlier)
    end
  end
  return ahead + 1
end

local function queue_place(tenant, run_id)
  local position = queue_position(tenant, run_id)
  if not position then
    return {}
  end
  local rank, fair = unpack(cmsgpack.unpack(redis.call('HGET', key.waiting, run_id)))
  return {position, rank, fair}
end
