-- part commit: whether a commit may be written, and writing it.
--   uses time text inbox promoted listed run queue; keys run inbox outbox rows, and those of run,
--        listed and queue
--   judge_commit(ask)                        answer, or nil; then version, highest
--     answer   why it is not written: {'gone'} {'committed', version} {'stale_fence', highest}
--              {'conflict'}
--   write_commit(ask, version, highest)      {'committed', version, promoted run, …}
-- ``ask`` is the commit: see part run, and
--   read_version, read_nonce  the stamp that the writer read
--   nonce                     of the new stamp
--   fence                     of the writer's lease, or false
--   applied                   inbox entries to remove
--   status                    of the run from now on
--   frees_key                 whether its key can be used again at once
--   goes_on                   whether waiting runs are promoted, see core.queue.goes_on
--   limit                     the cap of a tenant without configuration, or false
local function judge_commit(ask)
  apply_promotion(ask.run)
  local found = redis.call('HGET', key.run, 'stamp')
  if not found then
    return {'gone'}
  end
  local version, highest, nonce = unstamped(found)
  if nonce == ask.nonce then
    return {'committed', whole(version)}
  end
  if ask.fence and ask.fence < highest then
    return {'stale_fence', whole(highest)}
  end
  if version ~= ask.read_version or nonce ~= ask.read_nonce then
    return {'conflict'}
  end
  return nil, version, highest
end

-- Remove a run that ends while it waits.
local function stop_waiting(ask)
  leave_queue(ask.tenant, ask.run)
  local name = ask.frees_key and redis.call('HGET', key.run, 'key')
  if name then
    redis.call('HDEL', key.keys, name)
    redis.call('ZREM', key.aging, name)
  end
end

local function write_commit(ask, version, highest)
  many('HDEL', key.inbox, ask.applied)
  settle_row(ask.run)
  relist(ask.tenant, ask.status)
  become(ask, stamped(version + 1, ask.fence or highest, ask.nonce), false)
  local answer = {'committed', whole(version + 1)}
  if ask.is_finished then
    stop_waiting(ask)
  end
  if ask.goes_on then
    for _, run_id in ipairs(promote(ask.tenant, ask.limit)) do
      answer[#answer + 1] = run_id
    end
  end
  return answer
end
