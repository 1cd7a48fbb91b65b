-- items: items of a run, and the run's stamp at the same moment.
-- KEYS   run items
-- ARGV   the fields of the items
-- ANSWER {the stamp, or false without a run; {items, or false for missing ones}}
return {redis.call('HGET', key.run, 'stamp'), redis.call('HMGET', key.items, unpack(ARGV))}
