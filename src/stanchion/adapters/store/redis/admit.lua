-- admit: create runs of a tenant, in order, or return why not. All of a run is written, or nothing.
-- KEYS   run items out jobs inbox timeline
-- KEYS   ready ring turns counters open deadlines timers timers_of timer_turns outbox rows
-- KEYS   approvals asked asked_of
-- KEYS   active unfinished known finished keys aging configs rates ticks listed seen seen_names
-- KEYS   runs feed versions shared_versions shared_runs
-- KEYS   audit_log audit_log_of budgets reservations
-- KEYS   queue queue_ring queue_turns waiting queued promoted
-- KEYS   more*
--          of each further run: run items out jobs inbox timeline
-- ARGV   1  what the admissions have in common; then an admission for each run. All are MessagePack
--           maps; a member of an admission comes before the common one, and false may be absent:
--           see part run, and
--             not_after                 in this server's milliseconds
--             key, fingerprint          the idempotency key with its tenant, or false
--             definitions               own workflow id, version or 0 for none, …
--             shared                    the same of shared workflows, or false
--             shared_run                its member of shared_runs, or false
--             takes_slot, is_limited    whether it counts against the cap, against the job rate
--             budget                    what it reserves of budgets, by name
--             limit, rate               defaults for a tenant without configuration, or false
--             created                   the run's position in its tenant's list
--             status, listed            see part listed
--             version, fence, nonce     its stamp
--             tick                      the schedule with its tenant, and its new mark, or false
--             queue                     rank, fairness key (see part queue), on_full or false
--             waiting                   the run as it would wait: how many of the fields stay, its
--                                       further fields, items, timeline, timer; false if it never
--                                       waits
--             created_at                of the run
--             audit                     an audit entry (see part audit), or false
-- ANSWER a list with an answer for each run:
--        {'admitted'} {'too_late'} {'mismatch'} {'replayed', run}
--        {'tick_taken', the mark of its schedule}
--        {'stale_definition'}
--        {'over_budget', name, limit, used, reserved, end of its window or -1, what is asked}
--        {'full', limit, active} {'throttled'}
--        {'queued', position, when it has waited too long; absent if it was queued before}
--        {'queue_full', limit, active, how many may wait} {'no_queue'}
-- USES   time text budgets ready jobs retired timers effects listed run audit queue place
local OF_RUN = 6 -- keys of a run; those of the run at hand come first
local count = #ARGV - 1 -- of the runs

local last_created -- of the last run that was created

-- A command costs more than what it writes. So writes to keys that runs share are delayed, and one
-- command writes those of many runs. A run that reads such a key later, or that needs more than a
-- slot, jobs and timers, calls flush first and is written at once.
local is_delaying, delayed, order = false, {}, {}
local slots, active_now = 0, nil -- how many slots are delayed; the tenant's with them, if read
local records = {} -- by idempotency key: its record, or false; nil if it must be read
local numbered, last_number = 0, nil -- how many numbers of jobs were used, and the last one
local joined, has_queue = {}, nil
local write_now, number_now, join_now = many, numbers, join

many = function(command, at, values)
  local is_of_run = false
  for i = 1, OF_RUN do
    is_of_run = is_of_run or KEYS[i] == at
  end
  if is_of_run or not is_delaying then
    return write_now(command, at, values)
  end
  local all = delayed[at]
  if not all then
    order[#order + 1], delayed[at] = {command, at}, values
    return
  end
  for i = 1, #values do
    all[#all + 1] = values[i]
  end
end

numbers = function(jobs)
  if not is_delaying then
    return number_now(jobs)
  end
  last_number = last_number or tonumber(redis.call('HGET', key.counters, 'job') or '0')
  numbered, last_number = numbered + jobs, last_number + jobs
  return last_number - jobs
end

-- A queue that is in the ring stays there while this script runs.
join = function(topic, tenant)
  local queue = sized(topic) .. tenant
  if not joined[queue] then
    join_now(topic, tenant)
    joined[queue] = true
  end
end

local function flush(tenant)
  for _, each in ipairs(order) do
    write_now(each[1], each[2], delayed[each[2]])
  end
  if numbered > 0 then
    redis.call('HINCRBY', key.counters, 'job', numbered)
  end
  if slots > 0 and redis.call('HINCRBY', key.active, tenant, slots) == slots then
    redis.call('ZADD', key.known, 0, tenant)
  end
  delayed, order, slots, numbered, last_number = {}, {}, 0, 0, nil
  active_now = nil
end

local function active_slots(tenant)
  active_now = active_now or tonumber(redis.call('HGET', key.active, tenant) or '0')
  return active_now
end

local function record_of(name)
  if records[name] == nil then
    records[name] = redis.call('HGET', key.keys, name)
  end
  return records[name]
end

-- Whether the first transition of a run only takes a slot, dispatches jobs and sets timers.
local function is_plain(ask)
  for _, effect in ipairs(ask.effects) do
    if effect[1] ~= 'dispatch' and effect[1] ~= 'set' then
      return false
    end
  end
  return not ask.is_finished
end

-- Once, for the first run: what the others free is given away when a promoted run is decided on.
local function promote_waiting(ask)
  if has_queue == nil then
    has_queue = redis.call('HEXISTS', key.queued, ask.tenant) == 1
    if has_queue then
      flush(ask.tenant)
      promote(ask.tenant, ask.limit)
    end
  end
end

-- Neither the tenant's configuration nor the versions in force change while this script runs.
local configs, own_versions, shared_versions = {}, {}, {}

local function config_of(tenant)
  if configs[tenant] == nil then
    local packed = redis.call('HGET', key.configs, tenant)
    configs[tenant] = packed and cmsgpack.unpack(packed) or false
  end
  return configs[tenant]
end

local function are_in_force(ask)
  for i = 1, #ask.definitions, 2 do
    local id = ask.definitions[i]
    own_versions[id] = own_versions[id] or redis.call('HGET', key.versions, id) or '0'
    if tonumber(own_versions[id]) ~= ask.definitions[i + 1] then
      return false
    end
  end
  local config = ask.shared and config_of(ask.tenant)
  local pins = config and config[4] or {}
  for i = 1, ask.shared and #ask.shared or 0, 2 do
    local id = ask.shared[i]
    shared_versions[id] = shared_versions[id] or pins[id]
      or redis.call('HGET', key.shared_versions, id) or '0'
    if tonumber(shared_versions[id]) ~= ask.shared[i + 1] then
      return false
    end
  end
  return true
end

local function admit(ask, may_exist)
  -- The checks and their order are those of core.admission.judge. Keep them identical.
  if may_exist and redis.call('EXISTS', key.run) == 1 then
    local position = queue_position(ask.tenant, ask.run)
    return position and {'queued', position} or {'admitted'}
  end
  if now > ask.not_after then
    return {'too_late'}
  end
  local has_expired = false -- the record of the key
  if ask.key then
    local packed = record_of(ask.key)
    if packed then
      has_expired = true
      local known = cmsgpack.unpack(packed)
      local forgotten_at = tonumber(known[1])
      -- No expiry while the run is unfinished.
      if forgotten_at == 0 or now < forgotten_at then
        if known[2] ~= ask.fingerprint then
          return {'mismatch'}
        end
        return {'replayed', known[3]}
      end
    end
  end
  local mark = ask.tick and redis.call('HGET', key.ticks, ask.tick[1])
  if mark and mark >= ask.tick[2] then
    return {'tick_taken', mark}
  end
  if not are_in_force(ask) then
    return {'stale_definition'}
  end
  local limit, rate, budgets, queues = ask.limit, ask.rate, nil, false
  local config = config_of(ask.tenant)
  if config then
    limit, rate, budgets = config[1], config[2], config[5]
    queues = config[6] and ask.waiting
  end
  if budgets and #budgets > 0 then
    local refused = over_budget(ask.tenant, budgets, ask.budget)
    if refused then
      return refused
    end
  end
  if ask.queue[3] == 'queue' and not queues then
    return {'no_queue'}
  end
  local must_wait = false
  if ask.takes_slot then
    promote_waiting(ask)
    local active, queued = limit and active_slots(ask.tenant), 0
    if limit and has_queue then
      queued = queue_length(ask.tenant)
    end
    local taken = limit and math.max(active, math.min(limit, active + queued))
    if limit and taken >= limit then
      if not queues or ask.queue[3] == 'reject' then
        return {'full', limit, taken}
      end
      if active + queued - taken >= config[7] then
        return {'queue_full', limit, taken, config[7]}
      end
      must_wait = true
    end
  end
  if ask.is_limited and rate then
    -- The same as core.admission.Rate: one admission uses 1/rate seconds.
    local cost = 1000 / rate
    local burst = cost * math.max(1, rate)
    local used_until = tonumber(redis.call('HGET', key.rates, ask.tenant) or '0')
    if used_until > now + burst + 1 then
      used_until = 0 -- too far ahead: the clock was set back
    end
    local after_one = math.max(used_until, now) + cost
    if after_one - burst > now then
      return {'throttled'}
    end
    redis.call('HSET', key.rates, ask.tenant, string.format('%.17g', after_one))
  end

  is_delaying = count > 1 and not must_wait and is_plain(ask)
  if not is_delaying then
    flush(ask.tenant)
  end
  if ask.tick then
    redis.call('HSET', key.ticks, ask.tick[1], ask.tick[2])
  end
  local waits_until
  if must_wait then
    local kept, fields, items, timeline, timer = unpack(ask.waiting)
    for i = kept + 1, #ask.fields do
      ask.fields[i] = nil
    end
    for i = 1, #fields do
      ask.fields[kept + i] = fields[i]
    end
    waits_until = ask.created_at + config[8]
    ask.status, ask.items, ask.timeline, ask.is_finished = 'queued', items, timeline, false
    ask.effects = {{'set', timer[1], waits_until, '', timer[2]}}
    enqueue(ask.tenant, ask.run, ask.queue[1], ask.queue[2], ask.created)
    redis.call('ZADD', key.known, 0, ask.tenant)
    has_queue = true
  elseif ask.takes_slot and is_delaying then
    many('ZADD', key.unfinished, {0, sized(ask.tenant) .. ask.run})
    slots, active_now = slots + 1, active_now and active_now + 1
  elseif ask.takes_slot then
    take_slot(ask.tenant, ask.run)
  end
  if budgets and #budgets > 0 then
    reserve_budgets(ask.run, ask.tenant, budgets, ask.budget)
    ask.fields[#ask.fields + 1] = 'budgets'
    ask.fields[#ask.fields + 1] = 1
  end
  if ask.key then
    records[ask.key] = cmsgpack.pack({'0', ask.fingerprint, ask.run})
    many('HSET', key.keys, {ask.key, records[ask.key]})
    if has_expired then
      redis.call('ZREM', key.aging, ask.key)
    end
  end
  many('ZADD', key.runs, {0, ask.created})
  if ask.shared_run then
    many('ZADD', key.shared_runs, {0, ask.shared_run})
  end
  last_created = ask.created
  enlist(ask.listed, ask.tenant, ask.created, ask.status, ask.fields)
  become(ask, stamped(ask.version, ask.fence, ask.nonce), true)
  if ask.audit then
    write_audit(ask.audit)
  end
  if not is_delaying then
    -- A run that has ended has freed its slot, and changed the record of its key.
    active_now, records[ask.key or ''] = nil, nil
  end

  if must_wait then
    return {'queued', queue_position(ask.tenant, ask.run), waits_until}
  end
  return {'admitted'}
end

local answers, asks, names, others = {}, {}, {}, {}
local common = {__index = cmsgpack.unpack(ARGV[1])}
local named = #KEYS - OF_RUN * (count - 1)
for row = 1, count do
  asks[row] = setmetatable(cmsgpack.unpack(ARGV[row + 1]), common)
  names[#names + 1] = asks[row].key or nil
  others[row] = row < count and KEYS[named + OF_RUN * (row - 1) + 1] or nil -- the next run
end
if #names > 1 then
  for i, record in ipairs(redis.call('HMGET', key.keys, unpack(names))) do
    records[names[i]] = record
  end
end
local any_exists = redis.call('EXISTS', key.run, unpack(others)) > 0
local tenant, seen = asks[1].tenant, {}
for row = 1, count do
  if row > 1 then
    for i = 1, OF_RUN do
      KEYS[i] = KEYS[named + OF_RUN * (row - 2) + i]
    end
  end
  answers[row] = admit(asks[row], any_exists or seen[key.run])
  seen[key.run] = true
end
flush(tenant)
if last_created then
  if redis.call('HSET', key.seen, tenant, string.sub(last_created, 1, 16)) == 1 then
    redis.call('ZADD', key.seen_names, 0, tenant)
  end
  -- Each admission removes a few expired keys, so that their number stays bounded.
  local most = 2 * count
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', key.aging, 0, whole(now), 'LIMIT', 0, most)) do
    redis.call('HDEL', key.keys, name)
    redis.call('ZREM', key.aging, name)
  end
end
return answers
