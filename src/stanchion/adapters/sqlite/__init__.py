"""SQLite: the code that the SQLite store and the SQLite locks share."""
