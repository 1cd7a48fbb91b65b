"""Names: every subject, stream and consumer of ours, built in one place.

<namespace>.advance.<shard>.<run id>     calls, kept in the stream <NAMESPACE>_ADVANCE
<namespace>.bell                         bells, kept nowhere
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from stanchion.core.model import RunId
from stanchion.ports.errors import BackendRefused

__all__ = ["Names", "names_in"]

_FIT: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SHARD_DIGITS: Final = 2


class Names(msgspec.Struct, frozen=True):
    """What things are called in one namespace."""

    namespace: str

    @property
    def stream(self) -> str:
        return f"{self.namespace}_advance".upper()

    @property
    def consumer(self) -> str:
        return "replicas"

    @property
    def calls(self) -> str:
        """The subject of all calls."""
        return f"{self.namespace}.advance.>"

    @property
    def bells(self) -> str:
        return f"{self.namespace}.bell"

    @property
    def next_call(self) -> str:
        """Where calls are asked for."""
        return f"$JS.API.CONSUMER.MSG.NEXT.{self.stream}.{self.consumer}"

    def call(self, run_id: RunId) -> str:
        """The subject of one run's calls. The stream keeps at most one message of each subject."""
        return f"{self.namespace}.advance.{run_id[:_SHARD_DIGITS]}.{run_id}"


def names_in(namespace: str) -> Names:
    """The names in a namespace. Raises ``BackendRefused`` for one that NATS could not carry."""
    if _FIT.fullmatch(namespace) is None:
        raise BackendRefused(
            f"{namespace!r} cannot be a namespace on NATS: use up to 64 letters, digits, "
            "hyphens and underscores"
        )
    return Names(namespace)
