"""What a server's complaint means, in our words.

A server that refuses a command has not executed it: the scripts check before they write, and Redis
refuses a script for want of memory or replicas at its first write. So every complaint is either
``BackendUnavailable`` (ask again later), ``BackendRefused`` (somebody must change a setting) or
``BackendCorrupt`` (what is stored is not what we stored).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from stanchion.ports.errors import (
    BackendCorrupt,
    BackendError,
    BackendRefused,
    BackendTimeout,
    BackendUnavailable,
)

__all__ = ["Code", "ConnectionLost", "code_of", "translate"]


class ConnectionLost(BackendTimeout):
    """The connection broke after the command was sent: it may or may not have been executed."""


class Code(StrEnum):
    """The first word of an error reply, where it matters which."""

    NO_SCRIPT = "NOSCRIPT"
    MOVED = "MOVED"
    ASK = "ASK"
    TRY_AGAIN = "TRYAGAIN"
    READ_ONLY = "READONLY"
    NO_REPLICAS = "NOREPLICAS"
    CLUSTER_DOWN = "CLUSTERDOWN"


_UNAVAILABLE: Final = {
    "BUSY": "is busy with a script",
    "CLUSTERDOWN": "says that its cluster is down",
    "LOADING": "is still loading its data",
    "MASTERDOWN": "has lost its primary",
    "MISCONF": "cannot write its data to disk and takes no more",
    "MOVED": "has given the keys away, and so had those we were sent to",
    "ASK": "is giving the keys away",
    "NOREPLICAS": "has fewer replicas than min-replicas-to-write asks for",
    "OOM": "has no memory left",
    "READONLY": "is a replica",
    "TRYAGAIN": "is moving the keys",
    "UNBLOCKED": "has become a replica",
}
_REFUSED: Final = {
    "NOAUTH": "wants a password",
    "NOPERM": "does not let this user do it",
    "WRONGPASS": "does not accept the password",
}


def code_of(error: Exception) -> str:
    """The first word of an error reply."""
    return str(error).partition(" ")[0]


def translate(error: Exception, who: str) -> BackendError:
    """Our word for a server's error reply."""
    code = code_of(error)
    if code in _UNAVAILABLE:
        return BackendUnavailable(f"{who} {_UNAVAILABLE[code]} ({error})")
    if code in _REFUSED:
        return BackendRefused(f"{who} {_REFUSED[code]} ({error})")
    if code == "WRONGTYPE":
        return BackendCorrupt(f"{who} has something else under one of our keys ({error})")
    return BackendError(f"{who} answered: {error}")
