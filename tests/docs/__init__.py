"""Tests of what is written for people: links lead somewhere, examples run."""
