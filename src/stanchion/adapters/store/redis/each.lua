-- each: one read command on each of several keys, in one round trip.
-- KEYS   key*
-- ARGV   1 the command  then its arguments after the key
-- ANSWER for each key: the reply of the command
local answer = {}
for i, at in ipairs(KEYS) do
  answer[i] = redis.call(ARGV[1], at, unpack(ARGV, 2))
end
return answer
