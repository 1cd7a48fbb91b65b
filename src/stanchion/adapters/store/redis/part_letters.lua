-- part letters: dead letters.
--   uses time text; keys counters letters dead dead_of buried
--   add_letter(tenant, letter_id, letter)    store a letter, as the newest
--   remove_letter(tenant, letter_id)         remove a letter; false if there is none
-- A letter is stored with its place in the order and its time. A letter that is added again under
-- the same id gets the later place.
local function remove_letter(tenant, letter_id)
  local packed = redis.call('HGET', key.letters, letter_id)
  if not packed then
    return false
  end
  local place = cmsgpack.unpack(packed)[1]
  redis.call('HDEL', key.letters, letter_id)
  redis.call('ZREM', key.dead, place .. letter_id)
  redis.call('ZREM', key.dead_of, sized(tenant) .. place .. letter_id)
  redis.call('SREM', key.buried, letter_id)
  return true
end

local function add_letter(tenant, letter_id, letter)
  remove_letter(tenant, letter_id)
  local place = padded(now_us) .. padded(redis.call('HINCRBY', key.counters, 'letter', 1))
  redis.call('HSET', key.letters, letter_id, cmsgpack.pack({place, now, letter}))
  redis.call('ZADD', key.dead, 0, place .. letter_id)
  redis.call('ZADD', key.dead_of, 0, sized(tenant) .. place .. letter_id)
  redis.call('SADD', key.buried, letter_id)
end
