"""Tests of the gateway: over ASGI without sockets, and over sockets where they matter."""
