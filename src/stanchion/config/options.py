"""Options: all settings of a server, each declared once.

The command line, the environment, the file and the reference page are generated from ``OPTIONS``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

import msgspec

from stanchion.config.addresses import is_redis
from stanchion.core.lease import TermS
from stanchion.core.ranges import range_of
from stanchion.core.url import shown_url

PREFIX: Final = "STANCHION_"
FILE_SUFFIX: Final = "_FILE"
_TERM_S: Final = range_of(TermS)
_DAY_S: Final = 86_400.0


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """One server's configuration. Its ``repr`` never shows a key or a password."""

    host: str = "127.0.0.1"
    port: int = 8420
    store: str | None = None
    locks: str | None = None
    bus: str | None = None
    data_dir: str = "."
    namespace: str = "stanchion"
    run_lease_ttl_s: float = 30.0
    job_lease_ttl_s: float = 60.0
    admin_key: str | None = None
    idempotency_ttl_s: float = _DAY_S
    retention_s: float = 30 * _DAY_S
    audit_retention_s: float = 90 * _DAY_S
    max_deliveries: int = 5
    poison_failures_max: int = 5
    tenant_work_percent: int = 25
    drain_s: float = 8.0
    drill_reports: str = "drill-reports"
    metrics_open: bool = False
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    log_level: str = "info"
    log_format: str = "auto"

    @property
    def store_url(self) -> str:
        """The store's URL: by default a SQLite file in the data directory."""
        return self.store or f"sqlite:{Path(self.data_dir) / 'stanchion.db'}"

    @property
    def locks_url(self) -> str:
        """The lock store's URL: by default the store if it is Redis, else in memory."""
        return self.locks or (self.store_url if is_redis(self.store_url) else "memory:")

    @property
    def bus_url(self) -> str:
        """The bus's URL: by default within this process."""
        return self.bus or "local:"

    def __repr__(self) -> str:
        shown = (f"{name}={_shown(name, getattr(self, name))}" for name in self.__struct_fields__)
        return f"Config({', '.join(shown)})"


def _shown(name: str, value: object) -> str:
    if name == "admin_key":
        return "None" if value is None else "'***'"
    is_url = name in {"store", "locks", "bus"} and isinstance(value, str)
    return repr(shown_url(str(value)) if is_url else value)


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One setting: its name in the file, its allowed values, and its meaning."""

    name: str
    kind: Literal["text", "int", "seconds", "url", "choice", "switch"]
    metavar: str
    help: str
    least: float = 0
    most: float = 0
    pattern: str = ""
    form: str = ""
    """What ``pattern`` means, in words."""
    choices: tuple[str, ...] = ()
    has_flag: bool = True
    is_secret: bool = False
    """Whether its value is or may contain a password; then it can also be read from a file."""

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return PREFIX + self.name.upper()

    @property
    def file_variable(self) -> str:
        """The variable that names a file with the value, for an option that is secret."""
        return self.variable + FILE_SUFFIX


OPTIONS: Final = (
    Option(
        name="host",
        kind="text",
        metavar="HOST",
        help="Address to listen on. Other than loopback needs keys.",
        pattern=r"[A-Za-z0-9._:%-]{1,255}",
        form="a host name or an IP address",
    ),
    Option(
        name="port",
        kind="int",
        metavar="PORT",
        help="Port to listen on; 0 takes a free one.",
        most=65_535,
    ),
    Option(
        name="store",
        kind="url",
        metavar="URL",
        is_secret=True,
        help="Where everything is kept: sqlite:PATH, redis://…, redis+cluster://…,"
        " redis+sentinel://… or memory:. Default: a SQLite file in the data directory.",
    ),
    Option(
        name="locks",
        kind="url",
        metavar="URL",
        is_secret=True,
        help="Where run leases are kept: redis://… (and its forms) or memory:. Default: with a"
        " Redis store, else in memory.",
    ),
    Option(
        name="bus",
        kind="url",
        metavar="URL",
        is_secret=True,
        help="What wakes replicas up: local: or nats://…. A Redis store needs nats://….",
    ),
    Option(
        name="data_dir",
        kind="text",
        metavar="DIR",
        help="Directory of the SQLite file. Default: stanchion in the user's data directory.",
        pattern=r"[^\0]+",
        form="a path",
    ),
    Option(
        name="namespace",
        kind="text",
        metavar="NAME",
        help="What keys and subjects begin with, for several installations on one Redis or NATS.",
        pattern=r"[A-Za-z0-9_-]{1,64}",
        form="1 to 64 letters, digits, '_' or '-'",
    ),
    Option(
        name="run_lease_ttl_s",
        kind="seconds",
        metavar="SECONDS",
        help="How long a replica holds a run without renewing.",
        least=_TERM_S.low,
        most=_TERM_S.high,
    ),
    Option(
        name="job_lease_ttl_s",
        kind="seconds",
        metavar="SECONDS",
        help="How long a worker holds a job without renewing.",
        least=_TERM_S.low,
        most=_TERM_S.high,
    ),
    Option(
        name="admin_key",
        kind="text",
        metavar="KEY",
        help="The first key, with every role. Not a flag: other users could read it there.",
        pattern=r"[!-~]{16,255}",
        form="16 to 255 visible ASCII characters without spaces",
        has_flag=False,
        is_secret=True,
    ),
    Option(
        name="idempotency_ttl_s",
        kind="seconds",
        metavar="SECONDS",
        help="How long an idempotency key is known after its run ended.",
        least=1,
        most=365 * _DAY_S,
    ),
    Option(
        name="retention_s",
        kind="seconds",
        metavar="SECONDS",
        help="How long a finished run is kept. Not shorter than idempotency_ttl_s.",
        least=1,
        most=3650 * _DAY_S,
    ),
    Option(
        name="audit_retention_s",
        kind="seconds",
        metavar="SECONDS",
        help="How long an entry of the audit log is kept.",
        least=1,
        most=3650 * _DAY_S,
    ),
    Option(
        name="max_deliveries",
        kind="int",
        metavar="N",
        help="How often one attempt at a job is handed out before it is a dead letter.",
        least=1,
        most=1000,
    ),
    Option(
        name="poison_failures_max",
        kind="int",
        metavar="N",
        help="How often handling an event may fail before it is a dead letter.",
        least=1,
        most=1000,
    ),
    Option(
        name="tenant_work_percent",
        kind="int",
        metavar="PERCENT",
        help="Processor time that one tenant may use on this server, in percent of one core.",
        least=1,
        most=1000,
    ),
    Option(
        name="drain_s",
        kind="seconds",
        metavar="SECONDS",
        help="How long requests under way may take after a signal to stop.",
        most=600,
    ),
    Option(
        name="drill_reports",
        kind="text",
        metavar="DIR",
        help="Directory with the reports of drills, which the console shows.",
        pattern=r"[^\0]+",
        form="a path",
    ),
    Option(
        name="metrics_open",
        kind="switch",
        metavar="",
        help="Answer /metrics without a key, also once there are keys.",
    ),
    Option(
        name="metrics_port",
        kind="int",
        metavar="PORT",
        help="Serve /metrics and /livez also at this port, with connections of its own; 0 takes a"
        " free one. On loopback it needs no key.",
        most=65_535,
    ),
    Option(
        name="metrics_host",
        kind="text",
        metavar="HOST",
        help="Address for metrics_port. Other than loopback asks for a key, like the main port.",
        pattern=r"[A-Za-z0-9._:%-]{1,255}",
        form="a host name or an IP address",
    ),
    Option(
        name="log_level",
        kind="choice",
        metavar="LEVEL",
        help="What is logged: debug, info, warning or error, and above.",
        choices=("debug", "info", "warning", "error"),
    ),
    Option(
        name="log_format",
        kind="choice",
        metavar="FORMAT",
        help="json: one object a line. text: for people. auto: text on a terminal, else json.",
        choices=("auto", "json", "text"),
    ),
)
