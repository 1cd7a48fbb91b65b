-- workflow: a workflow as a tenant runs it: its own one, or else the shared one.
-- KEYS   versions workflows configs shared_versions shared_workflows
-- ARGV   1 workflow id  2 version, or '' for the one in force  3 'own', 'shared' or '' for either
--        4 tenant
-- ANSWER version, record, 'own' or 'shared', 1 if its configuration pins it, else 0; nil if there
--        is none
local id, version = ARGV[1], ARGV[2]
if ARGV[3] ~= 'shared' then
  local newest = redis.call('HGET', key.versions, id)
  if newest or ARGV[3] == 'own' then
    version = version == '' and (newest or '0') or version
    local packed = redis.call('HGET', key.workflows, version .. ':' .. id)
    return packed and {version, packed, 'own', 0} or nil
  end
end
local config = redis.call('HGET', key.configs, ARGV[4])
local pins = config and cmsgpack.unpack(config)[4]
local pin = pins and pins[id]
if version == '' then
  version = pin and string.format('%.0f', pin)
    or redis.call('HGET', key.shared_versions, id) or '0'
end
local packed = redis.call('HGET', key.shared_workflows, version .. ':' .. id)
return packed and {version, packed, 'shared', pin and 1 or 0} or nil
