-- page: places of runs from the indexes of several keys, newest first.
-- KEYS   key*
-- ARGV   1 how many of each key  2 the place before which they are  3 the time since which
--        then the prefixes of the ranges to merge
-- ANSWER for each key: places
local limit = tonumber(ARGV[1])
local answer = {}
for i, at in ipairs(KEYS) do
  local found = {}
  for range = 4, #ARGV do
    local prefix = ARGV[range]
    local high, low = '(' .. prefix .. ARGV[2], '[' .. prefix .. ARGV[3]
    local names = redis.call('ZREVRANGEBYLEX', at, high, low, 'LIMIT', 0, limit)
    for _, name in ipairs(names) do
      found[#found + 1] = string.sub(name, #prefix + 1)
    end
  end
  if #ARGV > 4 then
    table.sort(found, function(one, other) return one > other end)
  end
  answer[i] = {}
  for place = 1, math.min(limit, #found) do
    answer[i][place] = found[place]
  end
end
return answer
