"""Addresses: checks of the URLs and hosts that a server is configured with."""

from __future__ import annotations

import ipaddress
import re
from typing import Final
from urllib.parse import urlsplit

from stanchion.core.faults import Near

_FORMS: Final = {
    "store": "sqlite:PATH, redis://…, redis+cluster://…, redis+sentinel://… or memory:",
    "locks": "redis://…, redis+cluster://…, redis+sentinel://… or memory:",
    "bus": "local: or nats://…",
}


def wrong_url(name: str, url: str) -> str | None:
    """The fault of the URL of the ``store``, the ``locks`` or the ``bus``; ``None`` if it is fine.

    The adapter that opens the URL checks the details.
    """
    scheme, _, rest = url.partition(":")
    is_bus = name == "bus"
    if url == ("local:" if is_bus else "memory:"):
        return None
    if is_nats(url) if is_bus else is_redis(url):
        return _wrong_address(url)
    if name == "store" and scheme == "sqlite":
        if rest == ":memory:":
            return "sqlite has no store in memory: use memory:"
        return None if rest else "names no file: write sqlite:PATH"
    if name == "locks" and scheme == "sqlite":
        return "a server keeps no leases in SQLite: leave --locks out, or give redis://…"
    hint = Near(scheme + ":", ("memory:", "sqlite:", "redis:", "nats:", "local:")).hint()
    return f"should be {_FORMS[name]}{hint}"


def _wrong_address(url: str) -> str | None:
    """The fault of a URL that names no host."""
    try:
        hosts = urlsplit(url).netloc.rpartition("@")[2]
    except ValueError:
        hosts = ""
    if url.partition(":")[2].startswith("//") and all(hosts.split(",")):
        return None
    return f"names no host: write {url.partition(':')[0]}://HOST:PORT"


def is_redis(url: str) -> bool:
    """Whether the URL is of Redis, in one of its forms. ``rediss`` is Redis with TLS."""
    return re.match(r"rediss?(\+cluster|\+sentinel)?:", url) is not None


def is_nats(url: str) -> bool:
    """Whether the URL is of NATS. ``tls`` is NATS with TLS."""
    return re.match(r"(nats|tls):", url) is not None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens there."""
    if host.lower() in {"localhost", "localhost."}:
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return False  # a name may resolve to any address
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
