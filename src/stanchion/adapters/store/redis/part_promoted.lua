-- part promoted: completes the promotion of a queued run, see part queue.
--   uses time inbox; keys run inbox outbox rows promoted
--   apply_promotion(run_id)   writes the run as the promotion made it, and posts the event. Every
--                             script that reads the state of a run, or may remove its outbox row,
--                             calls it first.
local function apply_promotion(run_id)
  -- Asked first, because a server may refuse to write.
  if redis.call('HEXISTS', key.promoted, run_id) == 0 then
    return
  end
  redis.call('HDEL', key.promoted, run_id)
  local version, fence, nonce =
    string.match(redis.call('HGET', key.run, 'stamp'), '^(%d+) (%d+) (.*)$')
  -- The new stamp depends on the old one alone, so that it is the same if this is lost and repeated.
  redis.call('HSET', key.run, 'status', 'pending',
    'stamp', whole(tonumber(version) + 1) .. ' ' .. fence .. ' +' .. nonce)
  -- The promotion has written the row. It may be taken by now, and must not become due again.
  add_entry('promoted', '{"event":"promoted"}')
end
