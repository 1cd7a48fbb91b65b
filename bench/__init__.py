"""Benchmarks: every ratio and time we claim, measured in one run and compared with its promise."""
