-- pool_use: how much of a pool of tokens is in use.
-- KEYS   tokens token_order token_rate
-- ARGV   1 how many per second, or ''
-- ANSWER unexpired tokens, time until the rate allows the next in ms, time
-- USES   time tokens
local rate = tonumber(ARGV[1])
local running = redis.call('ZCOUNT', key.tokens, '(' .. whole(now), '+inf')
return {running, rate and wait(rate, used(rate)) or 0, now}
