"""Buses: calls and bells between replicas."""
