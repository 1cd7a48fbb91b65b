-- admit_alike: create runs of a tenant that begin alike, or none of them.
-- KEYS   ready ring turns counters open timers timers_of timer_turns
-- KEYS   active unfinished known keys aging configs listed seen seen_names
-- KEYS   runs feed versions shared_versions queued budgets reservations
-- KEYS   more*
--          of each run: run out, timeline if it is a list; of the last one before them: run, if
--          it follows
-- ARGV   1  the time after which nothing is admitted, in this server's milliseconds
--        2  what they have in common, a MessagePack map: what part terms takes, and
--             count, is_keyed           how many runs, whether each has a key
--             follows                   whether runs come before these: none of these is admitted
--                                       unless the last one of those was
--             whose                     the tenant, with its length
--             base                      two texts around the input of a run, behind its id
--             fields                    of the hash of a run, each a name and a value
--             listed, kept              its names in ``listed``, and the last one as the run keeps
--                                       it, each up to the run's place
--             stamp
--             id_chars                  the length of an id
--             record                    two texts around the fingerprint of a key's record
--             jobs                      of each job of a run: what follows the run in its id, step,
--                                       topic, queue, its record up to its number and behind it;
--                                       two texts around the run in the step, and four around the
--                                       run, the run and the input in the job
--             timers                    of each timer of a run: its name, due, what is stored
--             timeline                  the timeline of a run, or false if ``fields`` have it
--             lines                     the same as one JSON text
--             created_at                of all runs, as text
--        Then of each run its input, its key and the fingerprint if it has one, and of each of its
--        jobs the input. What can be made of these is made here: a word that is sent
--        costs more than one that is joined from others.
-- ANSWER {'admitted'}, or {'apart'} if each must be judged by itself: then nothing was written
-- USES   time text budgets ready timers terms
local ask = cmsgpack.unpack(ARGV[2])
local count, tenant, whose = ask.count, ask.tenant, ask.whose
local OF_RUN = ask.timeline and 3 or 2 -- keys of a run
local named = #KEYS - OF_RUN * count - (ask.follows and 1 or 0)
local first = 3 -- where the words of the runs begin
local words = ask.is_keyed and 3 or 1 -- of a run, before those of its jobs
local width = words + #ask.jobs

local function are_admitted()
  if now > tonumber(ARGV[1]) then
    return false
  end
  if ask.follows and redis.call('EXISTS', KEYS[#KEYS]) == 0 then
    return false
  end
  local config = read_config(tenant)
  local limit, budgets = ask.limit, config[5]
  if #config > 0 then
    limit = config[1]
  end
  if budgets and #budgets > 0 or refused_by_terms(ask, config) then
    return false
  end
  -- Runs that wait come first: see the script admit.
  if redis.call('HEXISTS', key.queued, tenant) == 1 then
    return false
  end
  if limit and tonumber(redis.call('HGET', key.active, tenant) or '0') + count > limit then
    return false
  end
  local names, runs = {}, {}
  for i = 1, count do
    names[i] = ask.is_keyed and whose .. ARGV[first + width * (i - 1) + 1] or nil
    runs[i] = KEYS[named + OF_RUN * (i - 1) + 1]
  end
  if ask.is_keyed then
    for _, record in ipairs(redis.call('HMGET', key.keys, unpack(names))) do
      if record then
        return false
      end
    end
  end
  return redis.call('EXISTS', unpack(runs)) == 0
end

if not are_admitted() then
  return {'apart'}
end

-- The tables of words are made once: what differs is put into its place, run by run.
local of_run = {'base', '', 'whose', '', 'listed', '', 'stamp', ask.stamp, unpack(ask.fields)}
local own = #of_run
if ask.is_keyed then
  of_run[own + 1], own = 'key', own + 2
end
local out, timed = {}, #ask.jobs * 2
for j, job in ipairs(ask.jobs) do
  of_run[own + 2 * j - 1], out[2 * j] = 's:' .. job[2], job[2]
end
for t, timer in ipairs(ask.timers) do
  out[timed + 2 * t - 1], out[timed + 2 * t] = 't:' .. timer[1], timer[3]
end
local number = numbers(count * #ask.jobs)
local ready, open, keys, listed, runs, unfinished, timers = {}, {}, {}, {}, {}, {}, {}
for i = 1, count do
  local run, of_out, timeline = unpack(KEYS, named + OF_RUN * (i - 1) + 1, named + OF_RUN * i)
  local at = first + width * (i - 1)
  local id = string.sub(run, -ask.id_chars)
  local place = ask.created_at .. id
  of_run[2] = '{"id":"' .. id .. ask.base[1] .. ARGV[at] .. ask.base[2]
  of_run[4], of_run[6] = place .. tenant, ask.kept .. place
  if ask.is_keyed then
    local name = whose .. ARGV[at + 1]
    of_run[own] = name
    keys[2 * i - 1] = name
    keys[2 * i] = ask.record[1] .. ARGV[at + 2] .. ask.record[2] .. id
  end
  for j, job in ipairs(ask.jobs) do
    local name, step, work = id .. job[1], job[7], job[8]
    of_run[own + 2 * j], out[2 * j - 1] = step[1] .. id .. step[2], 'j:' .. name
    number = number + 1
    local nth = (i - 1) * #ask.jobs + j
    ready[2 * nth - 1] = 0
    ready[2 * nth] = job[4] .. padded(number) .. name
    open[4 * nth - 3] = 's:' .. name
    open[4 * nth - 2] = job[5] .. cmsgpack.pack(number) .. job[6]
    open[4 * nth - 1] = 'w:' .. name
    open[4 * nth] = work[1] .. id .. work[2] .. id .. work[3] .. ARGV[at + words + j - 1] .. work[4]
  end
  for t, timer in ipairs(ask.timers) do
    local nth = (i - 1) * #ask.timers + t
    timers[2 * nth - 1] = timer[2]
    timers[2 * nth] = id .. timer[1]
  end
  for l, range in ipairs(ask.listed) do
    local nth = (i - 1) * #ask.listed + l
    listed[2 * nth - 1] = 0
    listed[2 * nth] = range .. place
  end
  runs[2 * i - 1] = 0
  runs[2 * i] = place
  unfinished[2 * i - 1] = 0
  unfinished[2 * i] = whose .. id
  redis.call('HSET', run, unpack(of_run))
  redis.call('HSET', of_out, unpack(out))
  if ask.timeline then
    redis.call('RPUSH', timeline, unpack(ask.timeline))
  end
  redis.call('XADD', key.feed, '*', 'run', id, 'lines', ask.lines)
end
redis.call('XTRIM', key.feed, 'MAXLEN', '~', 10000)
many('ZADD', key.ready, ready)
many('HSET', key.open, open)
many('HSET', key.keys, keys)
many('ZADD', key.listed, listed)
many('ZADD', key.runs, runs)
many('ZADD', key.unfinished, unfinished)
set_timers(tenant, timers)
for _, job in ipairs(ask.jobs) do
  join(job[3], tenant)
end
if redis.call('HINCRBY', key.active, tenant, count) == count then
  redis.call('ZADD', key.known, 0, tenant)
end
if redis.call('HSET', key.seen, tenant, ask.created_at) == 1 then
  redis.call('ZADD', key.seen_names, 0, tenant)
end
-- Each admission removes a few expired keys, so that their number stays bounded.
local aged = redis.call('ZRANGEBYSCORE', key.aging, 0, whole(now), 'LIMIT', 0, 2 * count)
if #aged > 0 then
  redis.call('HDEL', key.keys, unpack(aged))
  redis.call('ZREM', key.aging, unpack(aged))
end
return {'admitted'}
