-- release: free a lock if the token still has it. The highest fence is kept.
-- KEYS   held ends
-- ARGV   1 name  2 token, or '' for any holder (an operator's release)
-- ANSWER 1; 0 if it has not
-- USES   time release
return release()
