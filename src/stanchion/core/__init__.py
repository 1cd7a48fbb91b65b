"""The pure core: what a run is, what may happen to it, and what follows.

Nothing here does I/O, reads a clock or draws a random number. Begin with ``model``, then ``run``.
"""
