-- load: a run and its inbox, read atomically.
-- KEYS   run inbox
-- ANSWER {fields of the run: name, value, …}, {entries of the inbox: id, entry, …}
return {redis.call('HGETALL', key.run), redis.call('HGETALL', key.inbox)}
