"""Why a call did not succeed, split by who acts.

    CallFailed
    ├── TryLater               the caller waits, and asks again: nothing is wrong
    │   ├── TenantFull           429: the tenant runs as many runs as it may
    │   └── Throttled            429: more than the tenant's rate
    ├── ServerUnavailable      the operator looks: 5xx, no connection, no answer in time
    ├── CallRefused            the programmer changes the call: any other 4xx
    │   ├── InvalidRequest       400, 413, 415, 422: ``errors`` names the places
    │   ├── IdempotencyMismatch  422: this key was used for something else
    │   ├── NotFound             404: no such thing, or another tenant's
    │   └── Conflict             409: decided otherwise before, or not in this state
    ├── AccessDenied           whoever hands out keys
    │   ├── Unauthenticated      401: no key, or not a valid one
    │   └── Forbidden            403: the key's role may not do this
    ├── UnexpectedAnswer       the operator or the programmer: that is no Stanchion server, or
    │                          one of another version
    └── WaitTimeout            the caller chose the time: the run goes on (also a TimeoutError)

``TryLater`` and ``ServerUnavailable`` come after retries, as far as there were any: ``gave_up``
says why they ended. Arguments that cannot be meant (an empty id, a key with a line break) are a
``ValueError``, and nothing is sent.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from stanchion.core.retry import GiveUpReason
from stanchion.wire.problems import FieldError
from stanchion.wire.runs import RunView

__all__ = [
    "AccessDenied",
    "CallFailed",
    "CallRefused",
    "Conflict",
    "Facts",
    "Forbidden",
    "GaveUpBecause",
    "IdempotencyMismatch",
    "InvalidRequest",
    "NotFound",
    "ServerUnavailable",
    "TenantFull",
    "Throttled",
    "TryLater",
    "Unauthenticated",
    "UnexpectedAnswer",
    "WaitTimeout",
]


class GaveUpBecause(StrEnum):
    """Why a call was not tried again."""

    NOT_RETRYABLE = GiveUpReason.NOT_RETRYABLE.value
    """Another try would be answered the same."""
    NOT_REPEATABLE = "not_repeatable"
    """The server may have done it, and doing it twice would not be the same."""
    ATTEMPTS_SPENT = GiveUpReason.ATTEMPTS_SPENT.value
    RETRY_AFTER_TOO_LONG = GiveUpReason.RETRY_AFTER_TOO_LONG.value
    """The server asks for more patience than the policy has."""
    TIME_SPENT = GiveUpReason.TIME_SPENT.value
    BUDGET_SPENT = "budget_spent"
    """The process retries as much as it may already."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about a call that failed."""

    call: str
    attempts: int = 1
    gave_up: GaveUpBecause = GaveUpBecause.NOT_RETRYABLE
    status: int | None = None
    """``None``: there was no answer."""
    code: str | None = None
    """The problem's ``code``. A program branches on this, or on the type of the error."""
    request_id: str | None = None
    """What the server's log calls this request."""
    retry_after_ms: int = 0
    errors: tuple[FieldError, ...] = ()
    limit: int | None = None
    active: int | None = None
    may_have_run: bool = False
    """The server may have done it nevertheless. With the same key, it is done once all the same."""
    idempotency_key: str | None = None


class CallFailed(Exception):
    """A call did not succeed. ``facts`` says all that is known, the class says who acts."""

    def __init__(self, message: str, facts: Facts) -> None:
        super().__init__(message, facts)  # Both: so that it can be pickled.
        self.message = message
        self.facts = facts

    def __str__(self) -> str:
        return self.message

    @property
    def code(self) -> str | None:
        """The problem's code, if there was an answer that had one."""
        return self.facts.code

    @property
    def gave_up(self) -> GaveUpBecause:
        """Why it was not tried again."""
        return self.facts.gave_up

    @property
    def retry_after_s(self) -> float:
        """When the server would like to be asked again; 0 if it did not say."""
        return self.facts.retry_after_ms / 1000

    @property
    def idempotency_key(self) -> str | None:
        """Start again with this key: if the run was started after all, you get that one."""
        return self.facts.idempotency_key


class TryLater(CallFailed):
    """The tenant has used up what it may have, for now."""


class TenantFull(TryLater):
    """As many runs are active as the tenant may have."""

    @property
    def limit(self) -> int | None:
        """How many runs may be active at once."""
        return self.facts.limit

    @property
    def active(self) -> int | None:
        """How many are."""
        return self.facts.active


class Throttled(TryLater):
    """More in a short time than the tenant may."""


class ServerUnavailable(CallFailed):
    """The server cannot, or cannot be reached."""

    @property
    def may_have_run(self) -> bool:
        """Whether the server may have done it nevertheless."""
        return self.facts.may_have_run


class CallRefused(CallFailed):
    """The call is not one that can succeed."""


class InvalidRequest(CallRefused):
    """The server does not accept what was sent."""

    @property
    def errors(self) -> tuple[FieldError, ...]:
        """Every fault, with its place."""
        return self.facts.errors


class IdempotencyMismatch(CallRefused):
    """The key was used before, for another workflow or another input."""


class NotFound(CallRefused):
    """There is no such thing, or it belongs to another tenant."""


class Conflict(CallRefused):
    """It was decided otherwise before, or cannot be done in this state."""


class AccessDenied(CallFailed):
    """The API key does not open this door."""


class Unauthenticated(AccessDenied):
    """There was no valid API key."""


class Forbidden(AccessDenied):
    """The key is valid, and its role may not do this."""


class UnexpectedAnswer(CallFailed):
    """An answer that a Stanchion server of this version does not give."""


class WaitTimeout(CallFailed, TimeoutError):
    """The run was not finished within the time. It goes on."""

    def __init__(self, message: str, facts: Facts, run: RunView) -> None:
        super().__init__(message, facts)
        self.args = (message, facts, run)
        self.run = run
        """The run as it was seen last."""
