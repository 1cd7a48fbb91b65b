-- part commit: whether a commit may be written, and writing it.
--   uses time text inbox listed run; keys run inbox outbox rows, and those of run and listed
--   judge_commit(ask)                        answer, or nil; then version, highest
--     answer   why it is not written: {'gone'} {'committed', version} {'stale_fence', highest}
--              {'conflict'}
--   write_commit(ask, version, highest)      {'committed', version}
-- ``ask`` is the commit: see part run, and
--   read_version, read_nonce  the stamp that the writer read
--   nonce                     of the new stamp
--   fence                     of the writer's lease, or false
--   applied                   inbox entries to remove
--   status                    of the run from now on
local function judge_commit(ask)
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

local function write_commit(ask, version, highest)
  many('HDEL', key.inbox, ask.applied)
  settle_row(ask.run)
  relist(ask.tenant, ask.status)
  become(ask, stamped(version + 1, ask.fence or highest, ask.nonce), false)
  return {'committed', whole(version + 1)}
end
