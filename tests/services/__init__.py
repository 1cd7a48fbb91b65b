"""Tests of the services: the real code over ports whose faults are injected, in virtual time."""
