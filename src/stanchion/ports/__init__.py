"""Ports: what the services need from the world, stated as protocols. Adapters keep the promises."""
