-- oldest: the run of a shard that has waited longest for a slot, and the job that became ready first.
-- KEYS   listed ready ring
-- ARGV   1 the only tenant, or ''
-- ANSWER place of the run or '', number and id of the job or ''
-- USES   text
local only = ARGV[1]
-- The names are those of part listed.
local queued = only == '' and 'Squeued:' or 's' .. sized(only) .. 'queued:'
local run = redis.call('ZRANGEBYLEX', key.listed,
  '[' .. queued, '(' .. queued .. '\255', 'LIMIT', 0, 1)[1]
local oldest = ''
-- At most 1,000 queues. A place in the ring is the topic, the turn, sixteen digits, and the tenant.
for _, place in ipairs(redis.call('ZRANGE', key.ring, 0, 999)) do
  local colon = string.find(place, ':', 1, true)
  local last = colon + tonumber(string.sub(place, 1, colon - 1))
  local tenant = string.sub(place, last + 17)
  if only == '' or tenant == only then
    local queue = string.sub(place, 1, last) .. sized(tenant)
    local head = redis.call('ZRANGEBYLEX', key.ready,
      '[' .. queue, '(' .. queue .. '\255', 'LIMIT', 0, 1)[1]
    local found = head and string.sub(head, #queue + 1)
    if found and (oldest == '' or found < oldest) then
      oldest = found
    end
  end
end
return {run and string.sub(run, #queued + 1) or '', oldest}
