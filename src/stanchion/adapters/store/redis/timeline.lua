-- timeline: a part of the timeline of a run.
-- KEYS   run timeline
-- ARGV   1 the number of the first entry, from 0    2 how many more are wanted
-- ANSWER {the opening, or false if none of it is wanted, {entries as JSON texts}}
-- A run that was admitted by the script admit_alike has its first entries as one JSON text in its
-- hash, behind their number: the list has those after them.
local first, more = tonumber(ARGV[1]), tonumber(ARGV[2])
local opening = redis.call('HGET', key.run, 'opening')
local count = opening and tonumber(string.match(opening, '^%d+')) or 0
local last = first + more - count
return {
  first < count and opening,
  last < 0 and {} or redis.call('LRANGE', key.timeline, math.max(0, first - count), last),
}
