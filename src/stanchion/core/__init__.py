"""The pure core: the model of runs, and all decisions about them.

Nothing here does I/O, reads a clock or draws a random number. Start with ``model``, then ``run``.
"""
