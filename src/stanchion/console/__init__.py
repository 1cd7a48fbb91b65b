"""The console: pages for people, on the same services as the HTTP API."""
