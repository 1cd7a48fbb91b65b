"""Errors of stores, lock servers and buses.

    BackendError
    ├── BackendUnavailable     no answer; nothing was changed, or repeating the call is safe
    │   ├── BackendTimeout     no answer in time; the command may or may not have been executed
    │   └── BackendFull        it has no room left; an operator must make some
    ├── BackendCorrupt         stored data cannot be decoded; an operator must act
    └── BackendRefused         start-up stops: wrong file, wrong version, unsafe settings

Every adapter translates the errors of its driver into these. They mean that a backend has failed. A
full tenant, a contended lock or a stale writer is not an error: it is part of the return type.
"""

from __future__ import annotations


class BackendError(Exception):
    """A store, lock server or bus failed."""


class BackendUnavailable(BackendError):
    """The backend does not answer."""


class BackendTimeout(BackendUnavailable):
    """No answer in time. The command may still be executed, unless it carries its own deadline."""


class BackendFull(BackendUnavailable):
    """The backend has no room left to write."""


class BackendCorrupt(BackendError):
    """Stored data cannot be decoded."""


class BackendRefused(BackendError):
    """Continuing would not be safe. The message names the problem and its solution."""


def sentence(error: BaseException) -> str:
    """The message of an error for a log line or response; its class name if it has none.

    A wait that ended is raised without a message by asyncio.
    """
    if isinstance(error, TimeoutError):
        return str(error) or "no answer in time"
    return str(error) or type(error).__name__
