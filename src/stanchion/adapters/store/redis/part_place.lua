-- part place: the places of waiting runs. See part queue for what the keys hold.
--   uses text; keys queue queue_ring waiting
--   queue_position(tenant, run_id)   1 for the next run; nil if it does not wait. The same as
--                                    core.queue.FairQueue.position.
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
  local is_earlier = 1
  local ring = redis.call('ZRANGEBYLEX', key.queue_ring, '[' .. line, '(' .. line .. '\255')
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
