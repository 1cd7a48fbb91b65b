"""Whole stacks of real processes, and everything that can happen to them while they work."""
