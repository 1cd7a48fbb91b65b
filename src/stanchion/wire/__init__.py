"""Wire types: the JSON bodies of requests and answers.

The gateway decodes requests into these types and encodes answers from them; the SDKs do the
reverse; the OpenAPI document is generated from them. Unknown members of requests are refused.
Answers may gain members, so clients ignore unknown ones.
"""
