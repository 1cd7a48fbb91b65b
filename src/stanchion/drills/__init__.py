"""Drills: each policy of the control plane, tested on real processes, with a verdict and a report.

A drill starts its own servers on 127.0.0.1, drives load by a written schedule, injects one fault,
observes from outside (HTTP answers, metrics, log lines, commands that reach the lock store) and
compares what it measured with what the settings promise. ``command`` runs drills; ``processes``,
``proxy``, ``callers`` and ``observe`` are what they are made of. ``promises`` has a pure function
for each drill that judges; ``verdict``, ``charts`` and ``page`` are what comes out.
"""
