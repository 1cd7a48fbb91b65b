"""Promises: what each drill observes, and how it judges, tabulates and draws that.

Everything here is a pure function from what was seen: no processes, no clock, no files.
"""
