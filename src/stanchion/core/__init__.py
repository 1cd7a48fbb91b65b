"""The pure core: the model of runs, and all decisions about them.

Nothing here does I/O, reads a clock or draws a random number. Start with ``model``, then ``run``.
"""

# Here, where every part may read it. Not from the installed metadata: reading that takes longer
# than a request.
__version__ = "0.1.0.dev0"


def install_command(extras: str) -> str:
    """How to install these extras: from the index, or from a clone, which needs no release."""
    return f"pip install 'stanchion[{extras}]', or in a clone: pip install '.[{extras}]'"
