-- release_tokens: remove tokens of a pool.
-- KEYS   tokens token_order token_rate
-- ARGV   1 how many per second if the tokens are given back to the rate, else ''
--        then the names of the tokens
-- ANSWER how many were there
-- USES   time tokens
local rate, released = tonumber(ARGV[1]), 0
drop_expired()
for i = 2, #ARGV do
  released = released + remove(ARGV[i])
end
-- Without the key, which has expired, nothing of the rate is used, and nothing can be given back.
if rate and released > 0 and redis.call('EXISTS', key.token_rate) == 1 then
  local used_until = used(rate) - released * 1000 / rate
  redis.call('SET', key.token_rate, string.format('%.17g', used_until), 'KEEPTTL')
end
return released
