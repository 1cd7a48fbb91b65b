-- place: where a run waits in its tenant's queue.
-- KEYS   queue queue_ring queue_turns waiting
-- ARGV   1 run id  2 tenant
-- ANSWER its position, 1 for the next one; rank; fairness key. Nothing if the run does not wait
-- USES   text place
return queue_place(ARGV[2], ARGV[1])
