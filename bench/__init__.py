"""Benchmarks: every ratio and time we claim, measured in one run and held to its promise."""
