"""Options: the limits and time-outs of one gateway."""

from __future__ import annotations

import msgspec


class GatewayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one gateway. A request over a limit is refused, never queued."""

    admin_key: str | None = None
    """An admin key that is not stored: for a deployment that has no other key yet."""
    body_bytes_max: int = 1024 * 1024
    bodies_bytes_max: int = 128 * 1024 * 1024
    """All bodies together that are being read or handled."""
    answers_bytes_max: int = 128 * 1024 * 1024
    """All large answers together that clients have not read yet."""
    header_bytes_max: int = 32 * 1024
    headers_max: int = 100
    path_bytes_max: int = 4 * 1024
    query_bytes_max: int = 8 * 1024
    request_deadline_s: float = 30
    head_timeout_s: float = 10
    """From the start of a connection, or the first byte of a request, to the end of its head."""
    body_timeout_s: float = 10
    """From the end of the head to the end of the body."""
    connections_max: int = 16_384
    """The limit of open files of the process may lower it."""
    requests_at_once_max: int = 2_048
    requests_at_once_per_tenant_max: int = 1_024
    """Keeps the burst of one tenant from using all of ``requests_at_once_max``."""
    waits_max: int = 8_192
    """Requests that wait for a job, for the end of a run or for a lost lease."""
    waits_per_tenant_max: int = 1_000
    """A worker has up to two: it waits for jobs and for lost leases."""
    streams_max: int = 512
    streams_per_tenant_max: int = 50
    heartbeat_s: float = 15
    write_timeout_s: float = 10
    """A client that does not read its answer for this long is disconnected."""
    drill_reports: str | None = None
    """The directory with the reports of drills."""
    metrics_open: bool = False
    """Whether ``/metrics`` is answered without a key."""

    def __repr__(self) -> str:
        return "GatewayOptions(…)"  # it holds a secret
