-- part text: names inside sorted sets that are read by prefix.
--   sized(text)       length, colon, text: none is a prefix of another
--   padded(number)    sixteen digits, so that texts sort like numbers
--   many(command, at, values)   a command with any number of values (in pairs, if it takes pairs)
local function sized(text)
  return #text .. ':' .. text
end

local function padded(number)
  return string.format('%016.0f', number)
end

local function many(command, at, values)
  -- unpack uses the stack of Lua, which holds a few thousand values.
  for first = 1, #values, 1000 do
    redis.call(command, at, unpack(values, first, math.min(first + 999, #values)))
  end
end
