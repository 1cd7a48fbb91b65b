-- put_receipts: write a batch of receipts of refusals, once, and remove old ones.
-- KEYS   receipts refused refused_of refused_count counters
-- ARGV   1 tenant  2 batch id  3 how many receipts  4 the receipts as JSON
--        5 how many receipts of a tenant are kept  6 for how many ms
-- ANSWER nothing
-- USES   time text
-- ``receipts`` has {place, tenant, count, receipts} by batch id. All keys expire after the last batch.
local tenant, id, count = ARGV[1], ARGV[2], tonumber(ARGV[3])
if redis.call('HEXISTS', key.receipts, id) == 1 then
  return
end

local function remove(batch_id)
  local batch = cmsgpack.unpack(redis.call('HGET', key.receipts, batch_id))
  redis.call('HDEL', key.receipts, batch_id)
  redis.call('ZREM', key.refused, batch[1] .. batch_id)
  redis.call('ZREM', key.refused_of, sized(batch[2]) .. batch[1] .. batch_id)
  local left = redis.call('HINCRBY', key.refused_count, batch[2], -batch[3])
  if left <= 0 then
    redis.call('HDEL', key.refused_count, batch[2])
  end
  return left
end

local place = padded(now_us) .. padded(redis.call('HINCRBY', key.counters, 'receipts', 1))
redis.call('HSET', key.receipts, id, cmsgpack.pack({place, tenant, count, ARGV[4]}))
redis.call('ZADD', key.refused, 0, place .. id)
redis.call('ZADD', key.refused_of, 0, sized(tenant) .. place .. id)
local total = redis.call('HINCRBY', key.refused_count, tenant, count)

-- The tenant's oldest batches, as long as the others have enough receipts.
local mine = sized(tenant)
while total > tonumber(ARGV[5]) do
  local found = redis.call('ZRANGEBYLEX', key.refused_of,
    '[' .. mine, '(' .. mine .. '\255', 'LIMIT', 0, 1)
  local batch_id = string.sub(found[1], #mine + 33)
  local oldest = cmsgpack.unpack(redis.call('HGET', key.receipts, batch_id))
  if total - oldest[3] < tonumber(ARGV[5]) then
    break
  end
  total = remove(batch_id)
end
-- A few batches of any tenant that are too old.
local before = padded(now_us - tonumber(ARGV[6]) * 1000)
for _, old in ipairs(redis.call('ZRANGEBYLEX', key.refused, '-', '(' .. before, 'LIMIT', 0, 20)) do
  remove(string.sub(old, 33))
end
for _, at in ipairs({key.receipts, key.refused, key.refused_of, key.refused_count}) do
  redis.call('PEXPIRE', at, ARGV[6])
end
