"""Tests of the pure core: tables for what is stated, properties for what must always hold."""
