"""The client SDK: start runs, wait for them, and retry by policy while the server cannot answer.

Read ``engine`` first: one call and its retries, without input or output. ``calls`` and ``events``
define what can be called; ``client`` and ``async_client`` execute it over ``stanchion.transport``.
Each call is written once, so both clients can do the same by construction.

Names are imported from ``stanchion`` itself, which loads what is used: a blocking client does not
import an event loop.
"""
