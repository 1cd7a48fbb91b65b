-- release_in_turn: as release, and the bell rings for the first in line.
-- KEYS   held ends queue tickets
-- ARGV   as release
-- ANSWER as release
-- USES   time release line
local answer = release()
if answer == 1 then
  local first = first_in_line()
  if first then
    ring(first)
  end
end
return answer
