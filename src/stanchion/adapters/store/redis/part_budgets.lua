-- part budgets: what runs reserve and use of their tenant's budgets. The same as core.budget.
--   uses time text; keys budgets reservations
--   over_budget(tenant, limits, asked)           the answer of admit if too little is left, or nil
--   reserve_budgets(run_id, tenant, limits, asked)     for a new run
--   charge_usage(run_id, job, told)              a report of a leased job; the job is to be written
--   settle_budgets(run_id)                       when the run ends
--     limits  name, limit, window, … in the order of names; asked, told  amounts by name
-- The hash ``budgets`` has a tally for each tenant and name: window, start, generation, used, held.
-- The hash ``reservations`` has a list for each unfinished run of a tenant with budgets: the tenant,
-- then name, generation, reserved, used, …
local DAY_MS, HOUR_MS = 86400000, 3600000

-- The day of the month of a time, from the days since the epoch (proleptic Gregorian calendar).
local function day_of_month(ms)
  local shifted = math.floor(ms / DAY_MS) + 719468 -- days since 1 March of the year 0
  local of_era = shifted % 146097
  local year = math.floor((of_era - math.floor(of_era / 1460) + math.floor(of_era / 36524)
    - math.floor(of_era / 146096)) / 365)
  local of_year = of_era - (365 * year + math.floor(year / 4) - math.floor(year / 100))
  local month = math.floor((5 * of_year + 2) / 153)
  return of_year - math.floor((153 * month + 2) / 5) + 1
end

local function window_start(window, ms)
  if window == 'hour' then
    return ms - ms % HOUR_MS
  elseif window == 'day' then
    return ms - ms % DAY_MS
  elseif window == 'month' then
    return ms - ms % DAY_MS - (day_of_month(ms) - 1) * DAY_MS
  end
  return 0
end

local function window_end(window, start)
  if window == 'hour' then
    return start + HOUR_MS
  elseif window == 'day' then
    return start + DAY_MS
  elseif window == 'month' then
    return window_start(window, start + 31 * DAY_MS)
  end
  return nil
end

local function read_tally(tenant, name)
  local packed = redis.call('HGET', key.budgets, sized(tenant) .. name)
  if not packed then
    return nil
  end
  local v = cmsgpack.unpack(packed)
  return {window = v[1], start = v[2], generation = v[3], used = v[4], held = v[5]}
end

local function write_tally(tenant, name, tally)
  redis.call('HSET', key.budgets, sized(tenant) .. name, cmsgpack.pack(
    {tally.window, tally.start, tally.generation, tally.used, tally.held}))
end

local function present_tally(tenant, name, window)
  local tally, start = read_tally(tenant, name), window_start(window, now)
  if tally and tally.window == window and (tally.start == start
      or start < tally.start and tally.start <= now + HOUR_MS) then
    return tally
  end
  local generation = tally and tally.generation + 1 or 1
  return {window = window, start = start, generation = generation, used = 0, held = 0}
end

local function over_budget(tenant, limits, asked)
  for i = 1, #limits, 3 do
    local name, limit = limits[i], limits[i + 1]
    local amount = asked[name]
    if amount then
      local tally = present_tally(tenant, name, limits[i + 2])
      if tally.used + tally.held + amount > limit then
        local ends = window_end(tally.window, tally.start)
        return {'over_budget', name, limit, tally.used, tally.held, ends or -1, amount}
      end
    end
  end
  return nil
end

local function reserve_budgets(run_id, tenant, limits, asked)
  local reserved = {tenant}
  for i = 1, #limits, 3 do
    local name = limits[i]
    local tally, amount = present_tally(tenant, name, limits[i + 2]), asked[name] or 0
    tally.held = tally.held + amount
    write_tally(tenant, name, tally)
    for _, value in ipairs({name, tally.generation, amount, 0}) do
      reserved[#reserved + 1] = value
    end
  end
  redis.call('HSET', key.reservations, run_id, cmsgpack.pack(reserved))
end

local function charge_usage(run_id, job, told)
  local packed = redis.call('HGET', key.reservations, run_id)
  if not packed then
    return
  end
  -- A job keeps the names of its run's budgets only: each report may have new ones.
  local before, list = job.usage or {}, cmsgpack.unpack(packed)
  for i = 2, #list, 4 do
    local name, generation, reserved, used = unpack(list, i, i + 3)
    local amount = (told[name] or 0) - (before[name] or 0)
    if amount > 0 then
      local after = used + amount
      list[i + 3] = after
      local tally = read_tally(list[1], name)
      if tally and tally.generation == generation then
        tally.used = tally.used + amount
        tally.held = tally.held - (math.max(0, reserved - used) - math.max(0, reserved - after))
        write_tally(list[1], name, tally)
      end
      before[name] = told[name]
    end
  end
  job.usage = before
  redis.call('HSET', key.reservations, run_id, cmsgpack.pack(list))
end

local function settle_budgets(run_id)
  local packed = redis.call('HGET', key.reservations, run_id)
  if not packed then
    return
  end
  local list = cmsgpack.unpack(packed)
  for i = 2, #list, 4 do
    local name, generation, reserved, used = unpack(list, i, i + 3)
    local tally = reserved > used and read_tally(list[1], name)
    if tally and tally.generation == generation then
      tally.held = tally.held - (reserved - used)
      write_tally(list[1], name, tally)
    end
  end
  redis.call('HDEL', key.reservations, run_id)
end
