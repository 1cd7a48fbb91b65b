-- part ready: the queues of jobs that wait for a worker, and whose turn it is.
--   uses text; keys ready ring turns counters
--   numbers(count)                             so many new places at the tail of all queues
--   queued(job_id, number, topic, tenant)      a job's entry in the queue
--   join(topic, tenant)                        a place in the ring, unless they have one
-- A topic and tenant have a place in the ring while they have a job in the queue. A job that is
-- withdrawn leaves the place behind; whoever comes to it finds no job and takes it away.
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
