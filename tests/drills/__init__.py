"""Drills: how they judge, what they write, and that each can fail."""
