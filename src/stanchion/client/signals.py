"""What a client reports about its calls: frozen events, passed to a hook.

Metrics, log lines and traces of calls are made from these. The client itself neither counts nor
logs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from stanchion.client.errors import GaveUpBecause
from stanchion.core.retry import RetryClass
from stanchion.transport.messages import Silence


class _CallEvent(msgspec.Struct, frozen=True, kw_only=True):
    call: str
    """``start``, ``get``, ``cancel``…"""
    attempt: int
    """The first try is 1."""


class Answered(_CallEvent, frozen=True, kw_only=True):
    """A try has ended."""

    status: int | None
    silence: Silence | None
    """Why there is no status."""
    elapsed_ms: int


class Retrying(_CallEvent, frozen=True, kw_only=True):
    """The call is tried again, after the delay. A token of the class's budget was taken."""

    retry_class: RetryClass
    delay_ms: int
    retry_after_ms: int
    """What the server asked for; 0 if it did not."""


class GaveUp(_CallEvent, frozen=True, kw_only=True):
    """The call has failed."""

    retry_class: RetryClass | None
    reason: GaveUpBecause


CallSignal: TypeAlias = Answered | Retrying | GaveUp
CallHook: TypeAlias = Callable[[CallSignal], None]


def guarded(hook: CallHook | None) -> CallHook:
    """The hook, with its exceptions logged instead of raised."""
    if hook is None:
        return _no_hook

    def tell(signal: CallSignal) -> None:
        try:
            hook(signal)
        except Exception:
            import logging  # noqa: PLC0415 - 10 ms at import, needed only if a hook fails

            logging.getLogger("stanchion").exception("on_event failed for %r", signal)

    return tell


def _no_hook(_signal: CallSignal) -> None:
    pass
