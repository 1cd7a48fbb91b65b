-- release: let go of a name, if the token still has it. The highest fence stays.
-- KEYS   held ends
-- ARGV   1 name  2 token, or '' for an operator who takes it from whoever has it
-- ANSWER 1; 0 if it has not
-- USES   time release
return release()
