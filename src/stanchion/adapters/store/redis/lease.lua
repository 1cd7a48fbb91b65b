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

-- The first members with this prefix. '\255' occurs neither in numbers nor in UTF-8.
local function first(at, prefix, count)
  local low, high = '[' .. prefix, '(' .. prefix .. '\255'
  return redis.call('ZRANGEBYLEX', at, low, high, 'LIMIT', 0, count)
end

-- Remove a tenant from the head of the ring, and add it at the tail if it has another job.
local function pass(topic, tenant, queue, place)
  local has_more = #first(key.ready, queue, 1) > 0
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

local function hand_out(queue, entries)
  local ids, states, deadlines = {}, {}, {}
  for i, entry in ipairs(entries) do
    ids[i] = string.sub(entry, #queue + 17)
  end
  for i, found in ipairs(read_jobs(ids)) do
    local job, work = unpack(found)
    if job.timeout > 0 and job.ends == 0 then
      job.ends = now + job.timeout
    end
    job.state, job.worker, job.expires, job.progress = 'leased', worker, expires, ''
    job.usage = nil -- of an earlier fence
    job.deliveries = job.deliveries + 1
    -- core.lease.next_fence(previous, 0, server time)
    job.fence = math.max(job.fence + 1, 1, now_us)
    states[2 * i - 1], states[2 * i] = 's:' .. ids[i], pack_job(job)
    deadlines[2 * i - 1], deadlines[2 * i] = whole(due(job)), ids[i]
    local at = #answer
    answer[at + 1], answer[at + 2] = work, whole(job.fence)
    answer[at + 3], answer[at + 4] = job.deliveries, whole(expires)
  end
  many('ZREM', key.ready, entries)
  many('HSET', key.open, states)
  many('ZADD', key.deadlines, deadlines)
end

-- These return how many jobs were leased, at most ``count``.
local function from_tenant(topic, tenant, count)
  local queue = sized(topic) .. sized(tenant)
  local entries = first(key.ready, queue, count)
  if #entries > 0 then
    hand_out(queue, entries)
  end
  return #entries
end

-- A tenant that is asked for by name takes its turn as well.
local function from_named(topic, tenant, count)
  local leased, queue = from_tenant(topic, tenant, count), sized(topic) .. sized(tenant)
  local turn = redis.call('HGET', key.turns, queue)
  if turn then
    pass(topic, tenant, queue, sized(topic) .. turn .. tenant)
  end
  return leased
end

local function from_ring(topic, count)
  while true do
    local places = first(key.ring, sized(topic), 2)
    local place = places[1]
    if not place then
      return 0
    end
    local tenant = string.sub(place, #sized(topic) + 17)
    -- Several tenants take turns, job by job.
    local leased = from_tenant(topic, tenant, #places > 1 and 1 or count)
    pass(topic, tenant, sized(topic) .. sized(tenant), place)
    -- A tenant without a job: its jobs were revoked.
    if leased > 0 then
      return leased
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
      -- Several topics take turns as well.
      local count, leased = #shares > 1 and 1 or math.min(left, share.left), 0
      if only == '' then
        leased = from_ring(share.topic, count)
      else
        leased = from_named(share.topic, only, count)
      end
      left, share.left = left - leased, leased > 0 and share.left - leased or 0
      is_done = is_done and leased == 0
    end
  end
until is_done
return answer
