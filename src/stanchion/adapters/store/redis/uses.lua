-- uses: what a tenant runs under the id of a shared workflow.
-- KEYS   versions configs shared_versions shared_runs
-- ARGV   1 workflow id  2 tenant
-- ANSWER version of its own workflow, version that it pins, version of the shared workflow, each 0
--        for none; the number of unfinished runs of the shared workflow
-- USES   text
local id, tenant = ARGV[1], ARGV[2]
local config = redis.call('HGET', key.configs, tenant)
local pins = config and cmsgpack.unpack(config)[4]
local mine = sized(id) .. sized(tenant)
return {
  tonumber(redis.call('HGET', key.versions, id) or '0'),
  pins and pins[id] or 0,
  tonumber(redis.call('HGET', key.shared_versions, id) or '0'),
  redis.call('ZLEXCOUNT', key.shared_runs, '[' .. mine, '(' .. mine .. '\255'),
}
