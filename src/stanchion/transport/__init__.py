"""HTTP/1.1 for the client, the worker and the command line: one stack, blocking or on a loop.

``messages`` has the values (a request and its outcomes), ``parser`` turns bytes into a response
with llhttp (the package ``httptools``), ``blocking`` and ``event_loop`` own connections, and
``failover`` chooses which of several servers gets a request. Both transports promise the same:

* A request has one deadline over all that it does: connecting, sending and receiving.
* A connection is used again only if its last response was read to the end, the server allows it,
  and no byte has arrived since.
* If a kept connection turns out to be closed, the request is sent once more on a new one, provided
  that it is repeatable.
* The head and the body of a response are bounded. An ambiguous response is an error: a guess about
  where it ends would give one caller's response to another.
* They raise no network errors: a missing response is an outcome (``NoReply``).
"""
