"""The tests, from the pure core outward."""
