"""Errors of the outside world, in our words.

    BackendError
    ├── BackendUnavailable     nobody answers; nothing was changed, or it is safe to ask again
    │   └── BackendTimeout     no answer in time; what was asked may or may not have happened
    ├── BackendCorrupt         what is stored cannot be read; somebody must look
    └── BackendRefused         start-up will not go on: wrong file, wrong version, unsafe settings

Every adapter translates foreign errors into these once, at its edge. They say that something is
*broken*. What is merely *so* (a full tenant, a busy lock, a stale writer) is an answer, not an
error: it is in the return type.
"""

from __future__ import annotations

__all__ = [
    "BackendCorrupt",
    "BackendError",
    "BackendRefused",
    "BackendTimeout",
    "BackendUnavailable",
    "sentence",
]


class BackendError(Exception):
    """A store, lock server or bus did not do its part."""


class BackendUnavailable(BackendError):
    """Nobody answers."""


class BackendTimeout(BackendUnavailable):
    """No answer in time. The command may still be executed, unless it carries its own deadline."""


class BackendCorrupt(BackendError):
    """What is stored cannot be read."""


class BackendRefused(BackendError):
    """Going on would not be safe. The message says what is wrong and how to mend it."""


def sentence(error: BaseException) -> str:
    """What an error says, for a log line or an answer; its name, if it says nothing."""
    return str(error) or type(error).__name__
