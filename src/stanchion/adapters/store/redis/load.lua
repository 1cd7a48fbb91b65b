-- load: a run and its inbox, as they are at one moment.
-- KEYS   run inbox
-- ANSWER {fields of the run: name, value, …}, {entries of the inbox: id, entry, …}
return {redis.call('HGETALL', key.run), redis.call('HGETALL', key.inbox)}
