-- release_in_turn: like release, and the bell of the first waiter rings.
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
