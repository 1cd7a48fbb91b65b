-- fire: turn a due timer into an inbox entry.
-- KEYS   run inbox out outbox rows timers timers_of timer_turns
-- ARGV   1 run id  2 timer  3 the time at which it was due  4 tenant; '' if that is not known
-- ANSWER 1; 0 if it was removed or replaced since
-- USES   time text inbox
local run_id, timer, due, tenant = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
if tenant == '' then
  tenant = string.sub(redis.call('HGET', key.run, 'whose') or '', 40)
end
redis.call('ZREM', key.timers_of, sized(tenant) .. padded(tonumber(due)) .. run_id .. timer)
local packed = redis.call('HGET', key.out, 't:' .. timer)
if not packed or redis.call('ZSCORE', key.timers, run_id .. timer) ~= due then
  return 0
end
redis.call('ZREM', key.timers, run_id .. timer)
redis.call('ZADD', key.timer_turns, 'XX', 'GT', whole(now), tenant)
redis.call('HDEL', key.out, 't:' .. timer)
-- The event is a JSON object, and gets one member more.
local event = string.sub(cmsgpack.unpack(packed)[2], 1, -2) .. ',"due":' .. due .. '}'
put(run_id, 'timer:' .. timer .. '#' .. due, event, now)
return 1
