-- part ready: the queues of ready jobs, and the ring of tenants.
--   uses text; keys ready ring turns counters
--   numbers(count)                             so many new numbers, for the tail of all queues
--   queued(job_id, number, topic, tenant)      the entry of a job in the queue
--   join(topic, tenant)                        adds the tenant to the ring, unless it is there
-- A tenant is in the ring of a topic while it has a job in the queue. Revoking a job does not
-- update the ring; a lease or a look (ready_tenants) that finds no job removes the tenant.
local function numbers(count)
  return redis.call('HINCRBY', key.counters, 'job', count) - count
end

local function queued(job_id, number, topic, tenant)
  return sized(topic) .. sized(tenant) .. padded(number) .. job_id
end

local function join(topic, tenant)
  local queue = sized(topic) .. sized(tenant)
  if redis.call('HEXISTS', key.turns, queue) == 0 then
    local turn = padded(redis.call('HINCRBY', key.counters, 'turn', 1))
    redis.call('HSET', key.turns, queue, turn)
    redis.call('ZADD', key.ring, 0, sized(topic) .. turn .. tenant)
  end
end
