"""SQLite: what the store and the locks that use it have in common."""
