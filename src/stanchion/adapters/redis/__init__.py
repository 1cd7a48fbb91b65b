"""Talking to Redis: what the Redis store and the Redis locks have in common.

Calls of one turn of the event loop go out together (``gather``), to whichever server has the keys
(``fleet``), as scripts that the server already knows (``scripts``). Nothing in here knows what is
stored.
"""
