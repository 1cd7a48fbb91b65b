"""Redis URLs: which servers a URL names, and how to connect to them.

    redis://[user:password@]host[:port][/database]
    redis+cluster://[user:password@]host[:port],host[:port],…
    redis+sentinel://[user:password@]host[:port],host[:port],…/service[/database]

``rediss`` instead of ``redis`` uses TLS. redis-py reads the parts of a URL and makes the TLS
context; lists of hosts and the name of a Sentinel service are read here, because redis-py knows no
URL for them. Options follow a ``?``: ``ssl_ca_certs``, ``ssl_certfile``, ``ssl_keyfile`` and so on,
as in redis-py, and ``sentinel_username`` and ``sentinel_password``. Unknown options are refused, so
that no setting is silently ignored.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec
from redis.asyncio.connection import SSLConnection, parse_url
from redis.exceptions import RedisError

from stanchion.ports.errors import BackendRefused

_PORT: Final = 6379
_SENTINEL_PORT: Final = 26379
_FORMS: Final = (
    "redis://host:port/0, redis+cluster://host:port,… or redis+sentinel://host:port,…/service"
)
_TLS_OPTIONS: Final = (
    "ssl_ca_certs",
    "ssl_ca_path",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_password",
    "ssl_cert_reqs",
    "ssl_check_hostname",
    "ssl_ciphers",
)
_SENTINEL_OPTIONS: Final = ("sentinel_username", "sentinel_password")


class ServerAddress(NamedTuple):
    """The host and port of one server."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class ServerLayout(StrEnum):
    """How the servers of a URL are organised."""

    SINGLE = "single"
    CLUSTER = "cluster"
    SENTINEL = "sentinel"


class RedisTarget(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a URL."""

    kind: ServerLayout
    addresses: tuple[ServerAddress, ...]
    username: str | None = None
    password: str | None = None
    database: int = 0
    service: str = ""
    """The name of the primary's service in Sentinel."""
    sentinel_username: str | None = None
    sentinel_password: str | None = None
    has_tls: bool = False
    tls: Mapping[str, Any] = {}
    """Options of redis-py for the TLS context."""

    def __repr__(self) -> str:
        hosts = ",".join(map(str, self.addresses))
        return f"RedisTarget({self.kind.value}, {hosts})"

    def tls_context(self) -> ssl.SSLContext | None:
        """The TLS context; ``None`` without TLS. Raises ``BackendRefused`` for unusable files."""
        if not self.has_tls:
            return None
        try:
            return SSLConnection(**self.tls).ssl_context.get()
        except (OSError, ValueError, RedisError) as error:
            names = ", ".join(self.tls)
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise BackendRefused(f"the TLS options of a Redis URL ({names}): {reason}") from error

    def connection_options(self, *, for_sentinel: bool = False) -> dict[str, Any]:
        """The options of redis-py for a connection to one of these servers."""
        tls = {"ssl": True, **self.tls} if self.has_tls else {}
        if for_sentinel:
            return {"username": self.sentinel_username, "password": self.sentinel_password, **tls}
        return {"username": self.username, "password": self.password, **tls}


def read_url(url: str) -> RedisTarget:
    """Parse a URL. Raises ``BackendRefused``, which never quotes the URL."""
    scheme, _, rest = url.partition("://")
    speech, _, form = scheme.partition("+")
    if speech not in {"redis", "rediss"} or form not in {"", "cluster", "sentinel"}:
        raise BackendRefused(f"not a Redis URL: it should look like {_FORMS}")
    kind = ServerLayout(form) if form else ServerLayout.SINGLE
    try:
        parts = urlsplit(f"//{rest}")
    except ValueError:
        raise BackendRefused("a Redis URL whose host cannot be read") from None
    if "@" in parts.path + parts.query + parts.fragment:
        raise BackendRefused(
            "a Redis URL with '/', '?' or '#' in its user name or password: "
            "percent-encode them (%2F, %3F, %23)"
        )
    if parts.fragment or url.endswith("#"):
        raise BackendRefused("a Redis URL has no '#' part")
    user_info, at, hosts = parts.netloc.rpartition("@")
    port = _SENTINEL_PORT if kind is ServerLayout.SENTINEL else _PORT
    addresses = tuple(_address(host, port) for host in hosts.split(","))
    if kind is ServerLayout.SINGLE and len(addresses) > 1:
        raise BackendRefused("several hosts need redis+cluster:// or redis+sentinel://")
    service, database = _path(kind, parts.path)
    query = f"?{parts.query}" if parts.query else ""
    # A placeholder for the hosts: redis-py reads only user, password and options.
    options = _options(f"{speech}://{user_info}{at}host{query}", kind)
    return RedisTarget(
        kind=kind,
        addresses=addresses,
        username=options.pop("username", None),
        password=options.pop("password", None),
        database=database,
        service=service,
        sentinel_username=options.pop("sentinel_username", None),
        sentinel_password=options.pop("sentinel_password", None),
        has_tls=speech == "rediss",
        tls=options,
    )


def checked_namespace(namespace: str) -> str:
    """The namespace, if it is a valid prefix of keys: braces would be a hash tag."""
    if not namespace or any(each in "{}" or each.isspace() for each in namespace):
        raise BackendRefused(f"not a namespace: {namespace!r} (no braces, no white space)")
    return namespace


def _options(url: str, kind: ServerLayout) -> dict[str, Any]:
    """User, password and options of the URL, as redis-py reads them."""
    try:
        read: dict[str, Any] = dict(parse_url(url))
    except ValueError:
        raise BackendRefused("a Redis URL with an option whose value cannot be read") from None
    for name in ("host", "port", "connection_class"):
        read.pop(name, None)
    allowed = {"username", "password"}
    if url.startswith("rediss"):
        allowed.update(_TLS_OPTIONS)
    if kind is ServerLayout.SENTINEL:
        allowed.update(_SENTINEL_OPTIONS)
    if not read.keys() <= allowed:
        raise BackendRefused(
            "a Redis URL with an option that is not known or not for this kind of URL; known are "
            f"{', '.join(_TLS_OPTIONS)} with rediss, and {', '.join(_SENTINEL_OPTIONS)} with "
            "Sentinels"
        )
    return read


def _address(text: str, default_port: int) -> ServerAddress:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host:
        # Not quoted: it may be a part of a password that was not percent-encoded.
        raise BackendRefused(
            "a Redis URL whose host and port cannot be read: write host:port, and "
            "percent-encode the password"
        )
    return ServerAddress(host, default_port if port is None else port)


def _path(kind: ServerLayout, path: str) -> tuple[str, int]:
    """The name of the Sentinel service, and the number of the database."""
    segments = [unquote(each) for each in path.split("/") if each]
    service = ""
    if kind is ServerLayout.SENTINEL:
        if not segments:
            raise BackendRefused("redis+sentinel://…/service names the service to ask for")
        service = segments.pop(0)
    if not segments:
        return service, 0
    if kind is ServerLayout.CLUSTER or len(segments) > 1 or not segments[0].isdecimal():
        raise BackendRefused("the path of a Redis URL is not the number of a database")
    return service, int(segments[0])
