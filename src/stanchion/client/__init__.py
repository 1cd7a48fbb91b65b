"""The client SDK: start runs, wait for them, and behave well while the server cannot.

Read ``engine`` first: one call and its retries, without input or output. ``calls`` and ``events``
say what can be asked; ``client`` and ``async_client`` carry it out, on ``sockets`` and ``streams``.
Each thing is written once: what the two clients can do is the same by construction.

Names are imported from ``stanchion`` itself, which loads what is asked for: a blocking client does
not pay for an event loop.
"""
