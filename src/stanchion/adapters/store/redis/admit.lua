-- admit: create a run, or return why not. Writes everything or nothing.
-- KEYS   run items out jobs inbox timeline
-- KEYS   ready ring turns counters open deadlines timers outbox rows
-- KEYS   approvals asked asked_of
-- KEYS   active unfinished known finished keys aging configs rates ticks listed seen seen_names
-- KEYS   runs feed versions shared_versions shared_runs
-- KEYS   audit_log audit_log_of budgets reservations
-- ARGV   1  the admission, a MessagePack map: see part run, and
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
--             audit                     an audit entry (see part audit), or false
-- ANSWER {'admitted'} {'too_late'} {'mismatch'} {'replayed', run} {'tick_taken'}
--        {'stale_definition'}
--        {'over_budget', name, limit, used, reserved, end of its window or -1, what is asked}
--        {'full', limit, active} {'throttled'}
-- USES   time text budgets ready jobs retired effects listed run audit
local ask = cmsgpack.unpack(ARGV[1])

-- The checks and their order are those of core.admission.judge. Keep them identical.
if redis.call('EXISTS', key.run) == 1 then
  return {'admitted'}
end
if now > ask.not_after then
  return {'too_late'}
end
if ask.key then
  local packed = redis.call('HGET', key.keys, ask.key)
  if packed then
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
if ask.tick and (redis.call('HGET', key.ticks, ask.tick[1]) or '') >= ask.tick[2] then
  return {'tick_taken'}
end
for i = 1, #ask.definitions, 2 do
  local version = redis.call('HGET', key.versions, ask.definitions[i]) or '0'
  if tonumber(version) ~= ask.definitions[i + 1] then
    return {'stale_definition'}
  end
end
local limit, rate, pins, budgets = ask.limit, ask.rate, nil, nil
local config = redis.call('HGET', key.configs, ask.tenant)
if config then
  config = cmsgpack.unpack(config)
  limit, rate, pins, budgets = config[1], config[2], config[4], config[5]
end
if ask.shared then
  for i = 1, #ask.shared, 2 do
    local id = ask.shared[i]
    local version = pins and pins[id] or redis.call('HGET', key.shared_versions, id) or '0'
    if tonumber(version) ~= ask.shared[i + 1] then
      return {'stale_definition'}
    end
  end
end
if budgets and #budgets > 0 then
  local refused = over_budget(ask.tenant, budgets, ask.budget)
  if refused then
    return refused
  end
end
if ask.takes_slot and limit then
  local active = tonumber(redis.call('HGET', key.active, ask.tenant) or '0')
  if active >= limit then
    return {'full', limit, active}
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

if budgets and #budgets > 0 then
  reserve_budgets(ask.run, ask.tenant, budgets, ask.budget)
  ask.fields[#ask.fields + 1] = 'budgets'
  ask.fields[#ask.fields + 1] = 1
end
if ask.tick then
  redis.call('HSET', key.ticks, ask.tick[1], ask.tick[2])
end
if ask.takes_slot then
  redis.call('ZADD', key.unfinished, 0, sized(ask.tenant) .. ask.run)
  if redis.call('HINCRBY', key.active, ask.tenant, 1) == 1 then
    redis.call('ZADD', key.known, 0, ask.tenant)
  end
end
if ask.key then
  redis.call('HSET', key.keys, ask.key, cmsgpack.pack({'0', ask.fingerprint, ask.run}))
  redis.call('ZREM', key.aging, ask.key)
end
redis.call('ZADD', key.runs, 0, ask.created)
if ask.shared_run then
  redis.call('ZADD', key.shared_runs, 0, ask.shared_run)
end
if redis.call('HSET', key.seen, ask.tenant, string.sub(ask.created, 1, 16)) == 1 then
  redis.call('ZADD', key.seen_names, 0, ask.tenant)
end
enlist(ask.listed, ask.tenant, ask.created, ask.status)
become(ask, stamped(ask.version, ask.fence, ask.nonce), true)
if ask.audit then
  write_audit(ask.audit)
end

if ask.key then
  -- Each admission removes a few expired keys, so that their number stays bounded.
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', key.aging, 0, whole(now), 'LIMIT', 0, 2)) do
    redis.call('HDEL', key.keys, name)
    redis.call('ZREM', key.aging, name)
  end
end
return {'admitted'}
