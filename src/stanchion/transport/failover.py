"""Failover: which of several servers of a deployment gets a request. No sockets here.

Requests go to one server for as long as it answers. When it does not, the next server in the list
is tried, within the same deadline, and gets the requests that follow. A request goes on to the
next server in the same call

* if no connection was made: refused, no route, not in time;
* if the server answered 503 ``draining``: nothing was begun;
* if a proxy answered 502, 503 or 504 in its place and the request is repeatable;
* if the connection broke and the request is repeatable: it reads, replaces or carries a key.

A time-out and every 503 of a server itself is returned to the caller, whose retry goes to the next
server: a request that all servers refuse must not be multiplied by their number.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Final, TypeAlias

import msgspec
from msgspec.structs import replace

from stanchion.transport.messages import (
    Address,
    HttpReply,
    NoReply,
    Request,
    Silence,
    parse_address,
)

CONNECT_S_MAX: Final = 3.0
"""How long one of several servers may take to accept a connection."""
_UNAVAILABLE: Final = frozenset({502, 503, 504})
_DRAINING: Final = "draining"


class ServerOrder:
    """Which of several servers gets the next request: the one that answered last."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.current = 0

    def move_on(self, failed: int) -> None:
        """Prefer the next server, unless another request has changed the preference already."""
        if self.current == failed:
            self.current = (failed + 1) % self.count


_Attempts: TypeAlias = Generator[tuple[int, Request], HttpReply | NoReply, HttpReply | NoReply]


def attempts(order: ServerOrder, request: Request, now_s: Callable[[], float]) -> _Attempts:
    """Yield which server gets which request, receive the outcome, return the one that counts."""
    deadline_s, first = now_s() + request.timeout_s, order.current
    failed: list[HttpReply | NoReply] = []
    for offset in range(order.count):
        index, left_s = (first + offset) % order.count, deadline_s - now_s()
        if failed and left_s <= 0:
            break
        outcome = yield index, replace(request, timeout_s=left_s) if failed else request
        if isinstance(outcome, HttpReply) and outcome.status not in _UNAVAILABLE:
            return outcome
        order.move_on(index)
        if isinstance(outcome, HttpReply):
            code = _code_of(outcome)
            is_proxy = code is None and request.is_repeatable
            if code != _DRAINING and not is_proxy:
                return outcome
        elif outcome.may_have_run and not request.is_repeatable:
            return outcome
        failed.append(outcome)
    return _combined(failed)


def parse_addresses(url: str | Sequence[str]) -> tuple[Address, ...]:
    """Parse one URL, several separated by commas, or a list. Raises ``ValueError``."""
    urls = url.split(",") if isinstance(url, str) else url
    found = tuple(dict.fromkeys(parse_address(each.strip()) for each in urls))
    if not found:
        raise ValueError("no server's URL was given; one looks like http://127.0.0.1:8420")
    return found


class _Problem(msgspec.Struct, frozen=True):
    code: str | None = None


_PROBLEM: Final = msgspec.json.Decoder(_Problem)


def _code_of(reply: HttpReply) -> str | None:
    """The code of a server's refusal; ``None`` if something else has answered."""
    try:
        return _PROBLEM.decode(reply.body).code
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _combined(failed: Sequence[HttpReply | NoReply]) -> HttpReply | NoReply:
    """The most informative outcome: first one that may have been executed, then refusals."""
    if len(failed) == 1:
        return failed[0]
    silent = [each for each in failed if isinstance(each, NoReply)]
    message = "; ".join(each.message for each in silent)
    for each in silent:
        if each.may_have_run:
            return NoReply(each.silence, message)
    for reply in failed:
        if isinstance(reply, HttpReply):
            return reply
    unreached = any(each.silence is Silence.UNREACHED for each in silent)
    return NoReply(Silence.UNREACHED if unreached else Silence.UNTRUSTED, message)
