-- items: items of a run, and the run's stamp at the same moment.
-- KEYS   run items
-- ARGV   the fields of the items
-- ANSWER {the stamp, or false without a run; {items, or false for missing ones}}
local BLOCK_ITEMS = 256 -- the same as in encode.py

-- A block: the index of its first item, then its items. false if there is none.
local function read_block(name)
  local packed = redis.call('HGET', key.items, name)
  if not packed then
    return false
  end
  local lines = {}
  for line in string.gmatch(packed, '[^\n]+') do
    lines[#lines + 1] = line
  end
  return lines
end

local found, blocks = redis.call('HMGET', key.items, unpack(ARGV)), {}
for i, field in ipairs(ARGV) do
  if not found[i] then
    -- It has not begun since its step started.
    local index, step = string.match(field, '^(%d+):(.*)$')
    local name = 'b' .. math.floor(index / BLOCK_ITEMS) .. ':' .. step
    if blocks[name] == nil then
      blocks[name] = read_block(name)
    end
    local block = blocks[name]
    local place = block and index - block[1] + 2
    found[i] = place and place > 1 and block[place] or false
  end
end
return {redis.call('HGET', key.run, 'stamp'), found}
