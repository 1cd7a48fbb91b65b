-- part listed: the indexes of the lists of runs, in the sorted set ``listed`` of a shard.
--   uses text; keys run listed
--   A name there is a prefix and the place of the run: its time of creation and id. The prefixes of
--   a status are written here, the others by ``encode.listed_names``; they are kept with the run.
--   enlist(names, tenant, place, status, fields)    a new run; adds to the fields of its hash
--   relist(tenant, status)                  before the status of a run is written
--   delist()                                before a run is removed
local function by_status(tenant, place, status)
  return 's' .. sized(tenant) .. status .. ':' .. place, 'S' .. status .. ':' .. place
end

local function enlist(names, tenant, place, status, fields)
  local of_tenant, of_all = by_status(tenant, place, status)
  local entries = {0, of_tenant, 0, of_all}
  for _, name in ipairs(names) do
    entries[#entries + 1] = 0
    entries[#entries + 1] = name
  end
  many('ZADD', key.listed, entries)
  fields[#fields + 1] = 'listed'
  fields[#fields + 1] = cmsgpack.pack(names)
end

local function relist(tenant, status)
  local run = redis.call('HMGET', key.run, 'status', 'whose')
  if run[1] == status then
    return
  end
  local place = string.sub(run[2], 1, 39)
  local of_tenant, of_all = by_status(tenant, place, status)
  redis.call('ZREM', key.listed, by_status(tenant, place, run[1]))
  redis.call('ZADD', key.listed, 0, of_tenant, 0, of_all)
end

local function delist()
  local run = redis.call('HMGET', key.run, 'status', 'whose', 'listed')
  local place, tenant = string.sub(run[2], 1, 39), string.sub(run[2], 40)
  redis.call('ZREM', key.listed, by_status(tenant, place, run[1]))
  if run[3] then
    many('ZREM', key.listed, cmsgpack.unpack(run[3]))
  end
end
