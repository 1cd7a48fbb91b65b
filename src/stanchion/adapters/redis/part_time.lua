-- part time: the server's clock, read once, and numbers as text.
--   now_us, now       microseconds and milliseconds since the epoch
--   whole(number)     an integer as text; Lua's tostring writes 1.786e+15
local clock = redis.call('TIME')
local now_us = clock[1] * 1000000 + clock[2]
local now = math.floor(now_us / 1000)

local function whole(number)
  return string.format('%.0f', number)
end
