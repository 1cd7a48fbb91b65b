-- workflow: one version of a workflow, by default the newest.
-- KEYS   versions workflows
-- ARGV   1 workflow id  2 version, or ''
-- ANSWER version, record; nil if there is none
local version = ARGV[2]
if version == '' then
  version = redis.call('HGET', key.versions, ARGV[1]) or '0'
end
local packed = redis.call('HGET', key.workflows, version .. ':' .. ARGV[1])
return packed and {version, packed} or nil
