-- items: items of a run, and the run's stamp at the same moment.
-- KEYS   run items
-- ARGV   the fields of the items
-- ANSWER {the stamp, false without a run; {items, false for those that are not there}}
return {redis.call('HGET', key.run, 'stamp'), redis.call('HMGET', key.items, unpack(ARGV))}
