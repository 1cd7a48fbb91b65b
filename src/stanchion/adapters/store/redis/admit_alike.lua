-- admit_alike: create runs of a tenant that begin alike, or none of them.
-- KEYS   ready ring turns counters open timers
-- KEYS   active unfinished known keys aging configs listed seen seen_names
-- KEYS   runs feed versions shared_versions queued budgets reservations
-- KEYS   more*
--          of each run: run out timeline
-- ARGV   1  the time after which nothing is admitted, in this server's milliseconds
--        2  what they have in common, a MessagePack map: what part terms takes, and
--             count, jobs, timers       of runs, of jobs of a run, of timers of a run
--             fields, keyed             how many words of a run's hash, and runs with a key
--             topics                    of the jobs of a run
--             timeline, lines           its timeline, and the same as one JSON text
--             created_at                of all runs, as text
--        Then words, as they are written, so that this script makes few strings of its own:
--           of each job of a run: its queue, its record up to its number, and from there on
--           of each run: its id; the fields of its hash; of its hash ``out``
--           of each job of each run: its id, the names of its two fields in ``open``, the job
--           of each run with a key: the key with its tenant, its record
--           of each run: three scores and names in ``listed``; in ``runs``; in ``unfinished``
--           of each timer of each run: when it is due, its name
-- ANSWER {'admitted'}, or {'apart'} if each must be judged by itself: then nothing was written
-- USES   time text budgets ready terms
local ask = cmsgpack.unpack(ARGV[2])
local count, tenant = ask.count, ask.tenant
local OF_RUN = 3 -- keys of a run
local named = #KEYS - OF_RUN * count

-- Where each kind of words begins.
local kinds = 3
local rows = kinds + 3 * ask.jobs
local width = 1 + ask.fields + 2 * (ask.jobs + ask.timers)
local jobs = rows + count * width
local keyed = jobs + 4 * count * ask.jobs
local listed = keyed + 2 * ask.keyed
local runs = listed + 6 * count
local unfinished = runs + 2 * count
local timers = unfinished + 2 * count
local ends = timers + 2 * count * ask.timers

local function are_admitted()
  if now > tonumber(ARGV[1]) then
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
  local names, run, others = {}, KEYS[named + 1], {}
  for i = 1, ask.keyed do
    names[i] = ARGV[keyed + 2 * (i - 1)]
  end
  if #names > 0 then
    for _, record in ipairs(redis.call('HMGET', key.keys, unpack(names))) do
      if record then
        return false
      end
    end
  end
  for i = 1, count - 1 do
    others[i] = KEYS[named + OF_RUN * i + 1]
  end
  return redis.call('EXISTS', run, unpack(others)) == 0
end

if not are_admitted() then
  return {'apart'}
end

-- Write words as they came. ``unpack`` uses the stack of Lua, which holds a few thousand values.
local function write(command, at, first, last)
  for i = first, last, 1000 do
    redis.call(command, at, unpack(ARGV, i, math.min(i + 999, last)))
  end
end

for i = 1, count do
  local run, out, timeline = unpack(KEYS, named + OF_RUN * (i - 1) + 1, named + OF_RUN * i)
  local row = rows + width * (i - 1)
  redis.call('HSET', run, unpack(ARGV, row + 1, row + ask.fields))
  redis.call('HSET', out, unpack(ARGV, row + ask.fields + 1, row + width - 1))
  redis.call('RPUSH', timeline, unpack(ask.timeline))
  redis.call('XADD', key.feed, 'MAXLEN', '~', 10000, '*', 'run', ARGV[row], 'lines', ask.lines)
end

local number = numbers(count * ask.jobs)
local ready, open = {}, {}
for i = 0, count * ask.jobs - 1 do
  local of, job = kinds + 3 * (i % ask.jobs), jobs + 4 * i
  ready[2 * i + 1], ready[2 * i + 2] = 0, ARGV[of] .. padded(number + i + 1) .. ARGV[job]
  open[4 * i + 1] = ARGV[job + 1]
  open[4 * i + 2] = ARGV[of + 1] .. cmsgpack.pack(number + i + 1) .. ARGV[of + 2]
  open[4 * i + 3], open[4 * i + 4] = ARGV[job + 2], ARGV[job + 3]
end
many('ZADD', key.ready, ready)
many('HSET', key.open, open)
for _, topic in ipairs(ask.topics) do
  join(topic, tenant)
end

write('HSET', key.keys, keyed, listed - 1)
write('ZADD', key.listed, listed, runs - 1)
write('ZADD', key.runs, runs, unfinished - 1)
write('ZADD', key.unfinished, unfinished, timers - 1)
write('ZADD', key.timers, timers, ends - 1)
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
