-- acquire: take a lock that is free or that this token has already.
-- KEYS   held ends fence
-- ARGV   1 name  2 token  3 term in ms  4 not after, in this server's ms  5 floor
-- ANSWER {'granted', fence} {'held', ms until it ends} {'too_late'}
-- USES   time acquire
return acquire()
