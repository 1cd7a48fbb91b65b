-- part text: names inside sorted sets that are read by prefix.
--   sized(text)       length, colon, text: no such name is the beginning of another
--   padded(number)    sixteen digits, so that the order of texts is the order of numbers
--   many(command, at, values)   a command with any number of values (in pairs, if it takes pairs)
local function sized(text)
  return #text .. ':' .. text
end

local function padded(number)
  return string.format('%016.0f', number)
end

local function many(command, at, values)
  -- unpack puts everything on Lua's stack, which is some thousand values deep.
  for first = 1, #values, 1000 do
    redis.call(command, at, unpack(values, first, math.min(first + 999, #values)))
  end
end
