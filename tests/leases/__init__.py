"""Leases as a public API: over memory, SQLite and real servers, in one process and in several."""
