"""The pure core: the model of runs, and all decisions about them.

Nothing here does I/O, reads a clock or draws a random number. Start with ``model``, then ``run``.
"""

# Here, where every part may read it. Not from the installed metadata: reading that takes longer
# than a request.
__version__ = "0.1.0.dev0"
