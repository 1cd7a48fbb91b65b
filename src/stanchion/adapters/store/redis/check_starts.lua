-- check_starts: what the script admit would answer now to starts of a tenant. Writes nothing.
-- KEYS   keys configs versions shared_versions active queued budgets reservations
-- ARGV   1 tenant  2 a MessagePack list of terms, each as part terms takes them
--        then idempotency keys, each with its tenant
-- ANSWER for each of the terms: {'free'} or the refusal of a start with a new key or none;
--        then of the keys that are known: number, fingerprint, run, …
-- USES   time text budgets terms
local config, refused, known = read_config(ARGV[1]), {}, {}
for i, ask in ipairs(cmsgpack.unpack(ARGV[2])) do
  refused[i] = refused_by_terms(ask, config) or refused_by_cap(ask, config) or {'free'}
end
-- unpack uses the stack of Lua, which holds a few thousand values.
for first = 3, #ARGV, 1000 do
  local last = math.min(first + 999, #ARGV)
  for i, packed in ipairs(redis.call('HMGET', key.keys, unpack(ARGV, first, last))) do
    if packed then
      local forgotten_at, fingerprint, run_id = unpack(cmsgpack.unpack(packed))
      forgotten_at = tonumber(forgotten_at)
      -- No expiry while the run is unfinished.
      if forgotten_at == 0 or now < forgotten_at then
        known[#known + 1] = first + i - 4
        known[#known + 1] = fingerprint
        known[#known + 1] = run_id
      end
    end
  end
end
return {refused, known}
