"""The Redis client that the Redis store and the Redis locks share.

``address`` reads URLs, ``topology`` finds the server of a slot, ``node`` queues the calls for one
server and sends them in pipelines over its ``connection``s, and ``client`` sends requests to the
right server and follows redirects. ``startup`` checks the servers' settings. Why this is not
redis-py's own client: ``docs/adr/0012-redis-client.md``.
"""
