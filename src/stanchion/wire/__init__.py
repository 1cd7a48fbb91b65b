"""Wire types: what goes over HTTP, in both directions.

The gateway decodes requests into these and encodes answers from them; the SDKs do the reverse; the
OpenAPI document is generated from them. Requests refuse members they do not know. Answers may gain
members, so readers ignore unknown ones.
"""
