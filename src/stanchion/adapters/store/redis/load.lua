-- load: a run and its inbox, read atomically.
-- KEYS   run inbox outbox rows promoted
-- ARGV   1 run id
-- ANSWER {fields of the run: name, value, …}, {entries of the inbox: id, entry, …}
-- USES   time inbox promoted
apply_promotion(ARGV[1])
return {redis.call('HGETALL', key.run), redis.call('HGETALL', key.inbox)}
