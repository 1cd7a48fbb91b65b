"""The stateful model: every store answers as the memory store does, however many ask at once."""
