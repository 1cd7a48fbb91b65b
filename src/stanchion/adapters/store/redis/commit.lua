-- commit: write a transition, or return why not. Writes everything or nothing.
-- KEYS   run items out jobs inbox timeline
-- KEYS   ready ring turns counters open deadlines timers outbox rows
-- KEYS   approvals asked asked_of
-- KEYS   active unfinished finished keys aging shared_runs listed
-- KEYS   feed
-- ARGV   1  the commit, a MessagePack map: see part run, and
--             read_version, read_nonce  the stamp that the writer read
--             nonce                     of the new stamp
--             fence                     of the writer's lease, or false
--             applied                   inbox entries to remove
--             status                    of the run from now on
-- ANSWER {'gone'} {'committed', version} {'stale_fence', highest} {'conflict'}
-- USES   time text ready jobs retired inbox effects listed run
local ask = cmsgpack.unpack(ARGV[1])

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

many('HDEL', key.inbox, ask.applied)
settle_row(ask.run)
relist(ask.tenant, ask.status)
become(ask, stamped(version + 1, ask.fence or highest, ask.nonce), false)
return {'committed', whole(version + 1)}
