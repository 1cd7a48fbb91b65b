-- lease: lease ready jobs of one shard, of one tenant after the other.
-- KEYS   ready ring turns counters open deadlines
-- ARGV   1 worker id  2 term in ms  3 the only tenant, or ''  4 how many at most
--        5 the time after which nothing is leased, or ''
--        then for each topic: topic, how many of it at most
-- ANSWER for each job: its content, fence, deliveries, end of the lease
-- USES   time text jobs
local worker, expires, only = ARGV[1], now + tonumber(ARGV[2]), ARGV[3]
local answer = {}
if ARGV[5] ~= '' and now > tonumber(ARGV[5]) then
  return answer
end

-- The first member with this prefix. '\255' occurs neither in numbers nor in UTF-8.
local function first(at, prefix)
  return redis.call('ZRANGEBYLEX', at, '[' .. prefix, '(' .. prefix .. '\255', 'LIMIT', 0, 1)[1]
end

-- Remove a tenant from the head of the ring, and add it at the tail if it has another job.
local function pass(topic, tenant, queue, place)
  local has_more = first(key.ready, queue)
  local behind = redis.call('ZLEXCOUNT', key.ring, '(' .. place, '(' .. sized(topic) .. '\255')
  if has_more and behind == 0 then
    return -- It is the only tenant.
  end
  redis.call('ZREM', key.ring, place)
  if has_more then
    local turn = padded(redis.call('HINCRBY', key.counters, 'turn', 1))
    redis.call('HSET', key.turns, queue, turn)
    redis.call('ZADD', key.ring, 0, sized(topic) .. turn .. tenant)
  else
    redis.call('HDEL', key.turns, queue)
  end
end

local function hand_out(queue, entry)
  local job_id = string.sub(entry, #queue + 17)
  local job, work = read_job(job_id)
  redis.call('ZREM', key.ready, entry)
  if job.timeout > 0 and job.ends == 0 then
    job.ends = now + job.timeout
  end
  job.state, job.worker, job.expires, job.progress = 'leased', worker, expires, ''
  job.usage = nil -- of an earlier fence
  job.deliveries = job.deliveries + 1
  -- core.lease.next_fence(previous, 0, server time)
  job.fence = math.max(job.fence + 1, 1, now_us)
  write_job(job_id, job)
  redis.call('ZADD', key.deadlines, whole(due(job)), job_id)
  answer[#answer + 1] = work
  answer[#answer + 1] = whole(job.fence)
  answer[#answer + 1] = job.deliveries
  answer[#answer + 1] = whole(expires)
end

local function from_tenant(topic, tenant)
  local queue = sized(topic) .. sized(tenant)
  local entry = first(key.ready, queue)
  if entry then
    hand_out(queue, entry)
  end
  return entry
end

local function from_ring(topic)
  while true do
    local place = first(key.ring, sized(topic))
    if not place then
      return nil
    end
    local tenant = string.sub(place, #sized(topic) + 17)
    local entry = from_tenant(topic, tenant)
    pass(topic, tenant, sized(topic) .. sized(tenant), place)
    -- The tenant has no job: its jobs were revoked.
    if entry then
      return entry
    end
  end
end

local left, shares = tonumber(ARGV[4]), {}
for i = 6, #ARGV, 2 do
  shares[#shares + 1] = {topic = ARGV[i], left = tonumber(ARGV[i + 1])}
end
repeat
  local is_done = true
  for _, share in ipairs(shares) do
    if left > 0 and share.left > 0 then
      local entry
      if only == '' then
        entry = from_ring(share.topic)
      else
        entry = from_tenant(share.topic, only)
      end
      if entry then
        left, share.left, is_done = left - 1, share.left - 1, false
      else
        share.left = 0
      end
    end
  end
until is_done
return answer
