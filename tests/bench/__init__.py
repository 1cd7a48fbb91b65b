"""The benchmarks' own tests: that they measure what they say, not that the figures are good."""
