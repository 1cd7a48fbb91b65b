"""Addresses: which servers a URL means, and how they are spoken to.

    redis://[user:password@]host[:port][/database]
    redis+cluster://[user:password@]host[:port],host[:port],…
    redis+sentinel://[user:password@]host[:port],host[:port],…/service[/database]

``rediss`` instead of ``redis`` speaks TLS. A URL with anything else in it is refused: a setting
that was written down and ignored is worse than none.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec

from stanchion.ports.errors import BackendRefused

__all__ = ["Address", "Kind", "Target", "checked_namespace", "read_url"]

_PORT: Final = 6379
_SENTINEL_PORT: Final = 26379
_FORMS: Final = (
    "redis://host:port/0, redis+cluster://host:port,… or redis+sentinel://host:port,…/service"
)


class Address(NamedTuple):
    """Where one server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Kind(StrEnum):
    """How the servers of a URL belong together."""

    SINGLE = "single"
    CLUSTER = "cluster"
    SENTINEL = "sentinel"


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What a URL says."""

    kind: Kind
    addresses: tuple[Address, ...]
    username: str | None = None
    password: str | None = None
    database: int = 0
    service: str = ""
    """The name under which the sentinels know the primary."""
    has_tls: bool = False


def read_url(url: str) -> Target:
    """Take a URL apart. Raises ``BackendRefused``, without the password in its message."""
    parts = urlsplit(url)
    speech, _, form = parts.scheme.partition("+")
    if speech not in {"redis", "rediss"} or form not in {"", "cluster", "sentinel"}:
        raise BackendRefused(f"not a Redis URL: it should look like {_FORMS}")
    if parts.query or parts.fragment:
        raise BackendRefused("a Redis URL has no '?' or '#' part")
    kind = Kind(form) if form else Kind.SINGLE
    credentials, _, hosts = parts.netloc.rpartition("@")
    username, _, password = credentials.partition(":")
    port = _SENTINEL_PORT if kind is Kind.SENTINEL else _PORT
    addresses = tuple(_address(host, port) for host in hosts.split(","))
    if kind is Kind.SINGLE and len(addresses) > 1:
        raise BackendRefused("several hosts need redis+cluster:// or redis+sentinel://")
    service, database = _path(kind, parts.path)
    return Target(
        kind=kind,
        addresses=addresses,
        username=unquote(username) or None,
        password=unquote(password) or None,
        database=database,
        service=service,
        has_tls=speech == "rediss",
    )


def checked_namespace(namespace: str) -> str:
    """The namespace, if keys may begin with it. Braces would be taken for a hash tag."""
    if not namespace or any(each in "{}" or each.isspace() for each in namespace):
        raise BackendRefused(f"not a namespace: {namespace!r} (no braces, no white space)")
    return namespace


def _address(text: str, default_port: int) -> Address:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host:
        raise BackendRefused(f"not a host and port: {text!r}")
    return Address(host, default_port if port is None else port)


def _path(kind: Kind, path: str) -> tuple[str, int]:
    """The sentinels' service, and the number of the database."""
    segments = [unquote(each) for each in path.split("/") if each]
    service = ""
    if kind is Kind.SENTINEL:
        if not segments:
            raise BackendRefused("redis+sentinel://…/service names the service to ask for")
        service = segments.pop(0)
    if not segments:
        return service, 0
    if kind is Kind.CLUSTER or len(segments) > 1 or not segments[0].isdecimal():
        raise BackendRefused(f"not the path of a Redis URL: {path!r}")
    return service, int(segments[0])
