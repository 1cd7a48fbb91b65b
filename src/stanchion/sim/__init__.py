"""The simulator: the real services, over simulated ports, in virtual time."""
