"""Tests of what is shipped: the wheel, installed where nothing else is."""
