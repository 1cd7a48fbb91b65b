"""The mission's behaviours by their ids, from outside: HTTP on real processes and nothing else."""
