"""Buses: how replicas call each other."""
