-- part effects: applies the effects of a transition.
--   uses time text ready jobs retired timers
--   keys ready ring turns counters open deadlines approvals asked asked_of out jobs
--   carry_out(run_id, tenant, effects, is_new)   in their order; a new run has no jobs yet.
--     Each effect is one of
--     {'dispatch', job_id, step, item|false, topic, work, time of the attempt in ms or 0}
--     {'set', timer, due, step|'', event}      {'clear', timer}
--     {'open', step, place, approval}          {'close', step}
--     {'revoke', job_id}                       {'stop_step', step}
--     {'stop_run'}
-- The hash ``out`` of a run holds its open jobs, ``j:<job>`` with the job's step, its timers,
-- ``t:<timer>``, and its pending approvals, ``a:<step>`` with the place in the order of all. A
-- for-each dispatches thousands of jobs at once, so jobs are written in batches.

-- Of these jobs, those to dispatch, with the last fence of each: new jobs, and dead ones that are
-- replayed.
local function sendable(jobs)
  local answer = {}
  for first = 1, #jobs, 1000 do
    local last = math.min(first + 999, #jobs)
    local open, past = {}, {}
    for i = first, last do
      open[#open + 1] = 'j:' .. jobs[i][2]
      past[#past + 1] = jobs[i][2]
    end
    open = redis.call('HMGET', key.out, unpack(open))
    past = redis.call('HMGET', key.jobs, unpack(past))
    for i = first, last do
      local packed = past[i - first + 1]
      local state, fence = unpack_retired(packed)
      if not open[i - first + 1] and (not packed or state == 'dead') then
        jobs[i].fence = fence
        answer[#answer + 1] = jobs[i]
        if packed then
          redis.call('HDEL', key.jobs, jobs[i][2])
        end
      end
    end
  end
  return answer
end

-- ``out`` collects the fields to write to the run's hash of that name.
local function dispatch(tenant, jobs, is_new, out)
  if not is_new then
    jobs = sendable(jobs)
  end
  if #jobs == 0 then
    return
  end
  local ready, open, topics = {}, {}, {}
  local number = numbers(#jobs)
  for i, effect in ipairs(jobs) do
    local job_id, step, item, topic, work, timeout = unpack(effect, 2)
    local job = {
      state = 'ready', deliveries = 0, fence = effect.fence or 0, number = number + i,
      expires = 0, worker = '', topic = topic, step = step, item = item, tenant = tenant,
      timeout = timeout,
    }
    local at = 2 * i
    ready[at - 1], ready[at] = 0, queued(job_id, job.number, topic, tenant)
    out[#out + 1] = 'j:' .. job_id
    out[#out + 1] = step
    open[2 * at - 3], open[2 * at - 2] = 's:' .. job_id, pack_job(job)
    open[2 * at - 1], open[2 * at] = 'w:' .. job_id, work
    topics[topic] = true
  end
  many('ZADD', key.ready, ready)
  many('HSET', key.open, open)
  for topic in pairs(topics) do
    join(topic, tenant)
  end
end

local function set(run_id, tenant, effects, is_new, out)
  local timers, names = {}, {}
  for _, effect in ipairs(effects) do
    out[#out + 1] = 't:' .. effect[2]
    out[#out + 1] = cmsgpack.pack({effect[4], effect[5]})
    names[#names + 1] = run_id .. effect[2]
    timers[#timers + 1] = whole(effect[3])
    timers[#timers + 1] = names[#names]
  end
  if not is_new then
    forget_timers(tenant, names)
  end
  set_timers(tenant, timers)
end

local function open_approval(tenant, step, place, approval)
  redis.call('HSET', key.out, 'a:' .. step, place)
  redis.call('HSET', key.approvals, place, approval)
  redis.call('ZADD', key.asked, 0, place)
  redis.call('ZADD', key.asked_of, 0, sized(tenant) .. place)
end

local function close_approval(tenant, step)
  local place = redis.call('HGET', key.out, 'a:' .. step)
  if place then
    redis.call('HDEL', key.out, 'a:' .. step)
    redis.call('HDEL', key.approvals, place)
    redis.call('ZREM', key.asked, place)
    redis.call('ZREM', key.asked_of, sized(tenant) .. place)
  end
end

-- Revoke all jobs and remove all timers of one step and of the steps inside it, whose ids continue
-- with a dot; of one job; or of the whole run.
local function stop(run_id, tenant, only_step, only_job)
  local out
  if only_job then
    local step = redis.call('HGET', key.out, 'j:' .. only_job)
    out = step and {'j:' .. only_job, step} or {}
  else
    out = redis.call('HGETALL', key.out)
  end
  local inside = only_step and only_step .. '.'
  local function is_in(step)
    return not only_step or step == only_step or string.sub(step, 1, #inside) == inside
  end
  local gone, timers, jobs, deadlines, ready, open, past = {}, {}, {}, {}, {}, {}, {}
  for i = 1, #out, 2 do
    local kind, name = string.sub(out[i], 1, 1), string.sub(out[i], 3)
    local is_timer = kind == 't'
    local step = is_timer and cmsgpack.unpack(out[i + 1])[1] or out[i + 1]
    if kind == 'a' then
      if is_in(name) then
        close_approval(tenant, name)
      end
    elseif is_in(step) then
      gone[#gone + 1] = out[i]
      if is_timer then
        timers[#timers + 1] = run_id .. name
      else
        jobs[#jobs + 1] = name
      end
    end
  end
  for i, found in ipairs(read_jobs(jobs)) do
    local name, job, work = jobs[i], unpack(found)
    if job.state == 'ready' then
      ready[#ready + 1] = queued(name, job.number, job.topic, tenant)
    end
    if job.state == 'leased' or job.ends > 0 then
      deadlines[#deadlines + 1] = name
    end
    open[2 * i - 1], open[2 * i] = 's:' .. name, 'w:' .. name
    past[2 * i - 1], past[2 * i] = name, pack_retired(job, work, 'revoked', '')
  end
  many('HDEL', key.out, gone)
  forget_timers(tenant, timers)
  many('ZREM', key.ready, ready)
  many('ZREM', key.deadlines, deadlines)
  many('HDEL', key.open, open)
  many('HSET', key.jobs, past)
end

local function carry_out(run_id, tenant, effects, is_new)
  local jobs, timers = {}, {}

  local function flush()
    local out = {}
    set(run_id, tenant, timers, is_new, out)
    dispatch(tenant, jobs, is_new, out)
    many('HSET', key.out, out)
    jobs, timers = {}, {}
  end

  for _, effect in ipairs(effects) do
    local kind = effect[1]
    if kind == 'dispatch' then
      jobs[#jobs + 1] = effect
    elseif kind == 'set' then
      timers[#timers + 1] = effect
    else
      -- Write the effects before this one first, so that they are removed as well.
      flush()
      if kind == 'open' then
        open_approval(tenant, effect[2], effect[3], effect[4])
      elseif kind == 'close' then
        close_approval(tenant, effect[2])
      elseif kind == 'clear' then
        redis.call('HDEL', key.out, 't:' .. effect[2])
        forget_timers(tenant, {run_id .. effect[2]})
      else
        stop(run_id, tenant, kind == 'stop_step' and effect[2], kind == 'revoke' and effect[2])
      end
    end
  end
  flush()
end
