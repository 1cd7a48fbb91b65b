-- position: the place of a run in its tenant's queue, 1 for the next one.
-- KEYS   queue queue_ring queue_turns waiting
-- ARGV   1 run id  2 tenant
-- ANSWER the place; nil if the run does not wait
-- USES   text place
return queue_position(ARGV[2], ARGV[1])
