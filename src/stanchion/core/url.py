"""URLs without secrets: for logs, errors, health reports and the command line.

Passwords with ``/``, ``?``, ``#``, ``@`` or spaces are often written without percent-encoding. A
standard parser then ends the authority inside the password and takes the rest for a path. So
everything before the last ``@``, the query and the fragment are removed, and the rest is shown only
if it is hosts and a plain path. Any other URL is described, not quoted.
"""

from __future__ import annotations

import re
from typing import Final

_WITHOUT_HOST: Final = ("memory:", "local:", "sqlite:")
"""Schemes without server and user info: shown unchanged."""
_SCHEMES: Final = re.compile(r"((?:rediss?(?:\+cluster|\+sentinel)?|nats|tls|wss?|https?)):")
_HOST: Final = r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?"
_HOSTS: Final = rf"{_HOST}(?:,(?:[a-z]+://)?{_HOST})*"
_PLAIN: Final = re.compile(rf"({_HOSTS})((?:/[A-Za-z0-9._~-]*)*)")


def shown_url(url: str) -> str:
    """The URL without user info, query and fragment: ``redis://***@host:6379/0``.

    A URL that cannot be read as hosts and a plain path is described: ``(unreadable redis URL)``.
    """
    if url.startswith(_WITHOUT_HOST):
        return url
    known = _SCHEMES.match(url)
    scheme = "" if known is None else known[1]
    unreadable = f"(unreadable {scheme} URL)" if scheme else "(unreadable URL)"
    if not scheme or not url.startswith(f"{scheme}://"):
        return unreadable
    user_info, at, rest = url.removeprefix(f"{scheme}://").rpartition("@")
    del user_info
    plain = _PLAIN.fullmatch(re.split(r"[?#]", rest, maxsplit=1)[0])
    if plain is None:
        return unreadable
    return f"{scheme}://{'***@' if at else ''}{plain[1]}{plain[2]}"
