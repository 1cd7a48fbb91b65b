"""Options: how much one gateway takes on at a time, and for how long."""

from __future__ import annotations

import msgspec

__all__ = ["GatewayOptions"]


class GatewayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one gateway. What is over a limit is refused with a sentence, never queued."""

    admin_key: str | None = None
    """A key for everything that is not stored: the way in before there is any other."""
    body_bytes_max: int = 1024 * 1024
    bodies_bytes_max: int = 128 * 1024 * 1024
    """All bodies together that are being read or worked on."""
    answers_bytes_max: int = 128 * 1024 * 1024
    """All large answers together that their readers have not taken yet."""
    header_bytes_max: int = 32 * 1024
    headers_max: int = 100
    path_bytes_max: int = 4 * 1024
    query_bytes_max: int = 8 * 1024
    request_deadline_s: float = 30
    head_timeout_s: float = 10
    """From a connection's first moment, or a request's first byte, to the end of its head."""
    body_timeout_s: float = 10
    """From the end of the head to the end of the body."""
    connections_max: int = 16_384
    """And never more than the process may have files open."""
    requests_at_once_max: int = 2_048
    requests_at_once_per_tenant_max: int = 1_024
    """So that no tenant's burst keeps the others out."""
    waits_max: int = 8_192
    """Requests that wait for a job or for the end of a run."""
    waits_per_tenant_max: int = 500
    streams_max: int = 512
    streams_per_tenant_max: int = 50
    heartbeat_s: float = 15
    write_timeout_s: float = 10
    """A reader who lets an answer pile up for so long is cut off."""
    metrics_open: bool = False
    """Whether ``/metrics`` is answered without a key."""

    def __repr__(self) -> str:
        return "GatewayOptions(…)"  # it holds a secret
