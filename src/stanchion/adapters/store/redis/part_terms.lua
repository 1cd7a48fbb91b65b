-- part terms: the checks of core.admission.judge that do not depend on the run, its key or its tick.
--   uses time text budgets; keys versions shared_versions configs active queued budgets reservations
--   read_config(tenant)             the tenant's configuration, or an empty one, see put_tenant
--   refused_by_terms(ask, config)   {'stale_definition'}, {'over_budget', …}, {'no_queue'} or nil
--   refused_by_cap(ask, config)     {'full', …}, {'queue_full', …} or nil; then whether the cap is
--                                   reached: a start that is not refused must wait
--     ask       tenant, definitions, shared, budget, waiting, limit, and queue with on_full as its
--               third value, as in the script admit
local function read_config(tenant)
  local packed = redis.call('HGET', key.configs, tenant)
  return packed and cmsgpack.unpack(packed) or {}
end

local function refused_by_terms(ask, config)
  for i = 1, #ask.definitions, 2 do
    local version = redis.call('HGET', key.versions, ask.definitions[i]) or '0'
    if tonumber(version) ~= ask.definitions[i + 1] then
      return {'stale_definition'}
    end
  end
  local pins, budgets = config[4], config[5]
  if ask.shared then
    for i = 1, #ask.shared, 2 do
      local id = ask.shared[i]
      local version = pins and pins[id] or redis.call('HGET', key.shared_versions, id) or '0'
      if tonumber(version) ~= ask.shared[i + 1] then
        return {'stale_definition'}
      end
    end
  end
  local refused = budgets and #budgets > 0 and over_budget(ask.tenant, budgets, ask.budget)
  if refused then
    return refused
  end
  if ask.queue[3] == 'queue' and not (config[6] and ask.waiting) then
    return {'no_queue'}
  end
  return nil
end

local function refused_by_cap(ask, config)
  local limit = ask.limit
  if config[3] then
    limit = config[1] -- false without a cap
  end
  local active = limit and tonumber(redis.call('HGET', key.active, ask.tenant) or '0')
  local queued = limit and tonumber(redis.call('HGET', key.queued, ask.tenant) or '0')
  local taken = limit and math.max(active, math.min(limit, active + queued))
  if not limit or taken < limit then
    return nil, false
  end
  if not (config[6] and ask.waiting) or ask.queue[3] == 'reject' then
    return {'full', limit, taken}, true
  end
  if active + queued - taken >= config[7] then
    return {'queue_full', limit, taken, config[7]}, true
  end
  return nil, true
end
