"""HTTP/1.1 for the client, the worker and the command line: one stack, blocking or on a loop.

``messages`` has the values (a request, and what can come of it), ``parser`` turns bytes into a
response with llhttp (the package ``httptools``), ``blocking`` and ``event_loop`` own connections,
``failover`` says which of several servers gets a request.
The two transports make the same promises:

* A request has one deadline over all that it does: connecting, sending and receiving.
* A connection is used again only if its last response was read to the end, the server allows it,
  and no byte has arrived since.
* If a kept connection turns out to be closed, the request is sent once more on a new one, provided
  that it is repeatable.
* The head and the body of a response are bounded. What cannot be parsed for certain is an error: a
  guess about where a response ends would hand one caller's response to another.
* They raise nothing of the network's: that there was no response is an outcome (``NoReply``).
"""
