-- budgets: the tallies of a tenant's budgets, with its configuration.
-- KEYS   configs budgets
-- ARGV   1 tenant
-- ANSWER now, the configuration or nil, then for each budget: name, tally or nil (see part budgets)
-- USES   time text
local config = redis.call('HGET', key.configs, ARGV[1])
local answer = {now, config}
local limits = config and cmsgpack.unpack(config)[5] or {}
for i = 1, #limits, 3 do
  answer[#answer + 1] = limits[i]
  answer[#answer + 1] = redis.call('HGET', key.budgets, sized(ARGV[1]) .. limits[i])
end
return answer
