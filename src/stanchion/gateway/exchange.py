"""Exchange: one request's head, and the sending of its answer.

``Exchange`` checks the bounds of the head and sends an answer, a refusal or a stream.
``unless_gone`` cancels a long wait when the client disconnects or its key is revoked. Our server
(``protocol``) offers ASGI extensions for this, which are used if they are there.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import aclosing
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import msgspec

from stanchion.core.model import TenantId
from stanchion.gateway.load import Observe
from stanchion.gateway.options import GatewayOptions
from stanchion.gateway.problems import Refusal, RequestRefused, answer_parts
from stanchion.gateway.route import Reply, Stream
from stanchion.services.work import TaskCancellation
from stanchion.wire.problems import Code

_Result = TypeVar("_Result")
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

_HARDENING: Final = ((b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store"))
_JSON: Final = b"application/json"
_JSON_HEAD: Final = b"".join(
    (
        b"content-type: %b\r\ncontent-length: %%d\r\nx-request-id: %%b\r\n" % _JSON,
        *(b"%b: %b\r\n" % header for header in _HARDENING),
    )
)
"""The headers of most answers, as text: their length and the id of the request are missing."""
_NO_EXTENSIONS: Final[Mapping[str, Any]] = {}
GONE: Final = "stanchion.gone"
"""The ASGI extension that calls a function when the client disconnects."""
ANSWER: Final = "stanchion.answer"
"""The ASGI extension that takes a whole answer at once: one write instead of two."""
BODY: Final = "stanchion.body"
"""The ASGI extension that gives the whole body at once if it has arrived, or ``None``."""
REST: Final = "stanchion.rest"
"""The ASGI extension that stops reading from the connection for a second."""
STREAM: Final = "stanchion.stream"
"""The ASGI extension that prepares a connection for a stream, and can abort it."""
_SANE_ID = re.compile(rb"[A-Za-z0-9_.:/+=-]{1,128}")
_ONCE: Final = frozenset(
    {
        b"authorization",
        b"content-length",
        b"content-type",
        b"host",
        b"idempotency-key",
        b"last-event-id",
        b"origin",
        b"transfer-encoding",
        b"x-stanchion-tenant",
    }
)
"""Headers that are read here. A request that gives one of them twice is refused."""

_CHECK_S: Final = 1.0
Check: TypeAlias = Callable[[], Awaitable[None] | None]
"""Called every second during a wait. What it returns is awaited; ``None``: nothing to do."""
PART_BYTES: Final = 64 * 1024
"""Larger answers are sent in parts of this size."""
_encode: Final = msgspec.json.Encoder().encode
_numbers: Final = itertools.count(1)
_process: Final = secrets.token_hex(6)


class EncodedAnswer(NamedTuple):
    """An answer with its body encoded."""

    status: int
    body: bytes
    headers: list[tuple[bytes, bytes]] | None
    """``None``: only that the body is JSON, as in most answers."""


def ready(reply: Reply) -> EncodedAnswer:
    """Encode a reply."""
    value = reply.value
    if reply.headers == () and reply.content_type == _JSON and not isinstance(value, bytes):
        return EncodedAnswer(reply.status, _encode(value), None)
    body = value if isinstance(value, bytes) else _encode(value)
    return EncodedAnswer(
        reply.status, body, [(b"content-type", reply.content_type), *reply.headers]
    )


class Exchange:
    """One request and its answer."""

    __slots__ = (
        "_began_s",
        "_observe",
        "_options",
        "actor",
        "headers",
        "is_begun",
        "receive",
        "request_id",
        "scope",
        "send",
        "tenant",
    )

    def __init__(
        self,
        options: GatewayOptions,
        scope: Mapping[str, Any],
        receive: Receive,
        send: Send,
        observe: Observe,
    ) -> None:
        self._began_s = time.perf_counter()
        self._options = options
        self._observe = observe
        self.is_begun = False
        self.tenant: TenantId | None = None
        """The request's tenant, once it is known: costs are charged to it."""
        self.actor = ""
        self.scope = scope
        self.receive = receive
        self.send = send
        self.headers: Mapping[bytes, bytes] = dict(scope["headers"])
        given = self.headers.get(b"x-request-id")
        self.request_id = (
            f"{_process}-{next(_numbers):x}"
            if given is None or _SANE_ID.fullmatch(given) is None
            else given.decode("ascii")
        )

    def flaw(self) -> Refusal | None:
        """The refusal of a request with a head that is too large or ambiguous; ``None`` if fine."""
        options, scope, raw = self._options, self.scope, self.scope["headers"]
        if len(scope["query_string"]) > options.query_bytes_max:
            detail = f"the query has more than {options.query_bytes_max} bytes"
            return Refusal(code=Code.URI_TOO_LONG, detail=detail)
        if len(scope["path"]) > options.path_bytes_max:
            detail = f"the path has more than {options.path_bytes_max} characters"
            return Refusal(code=Code.URI_TOO_LONG, detail=detail)
        if len(raw) > options.headers_max:
            detail = f"more than {options.headers_max} headers"
            return Refusal(code=Code.HEADERS_TOO_LARGE, detail=detail)
        # All of them, with their names: a header that is given again replaces the one before.
        if sum(map(len, itertools.chain.from_iterable(raw))) > options.header_bytes_max:
            detail = f"the headers have more than {options.header_bytes_max} bytes"
            return Refusal(code=Code.HEADERS_TOO_LARGE, detail=detail)
        if len(self.headers) != len(raw):
            names = [name for name, _ in raw if name in _ONCE]
            if len(names) != len(set(names)):
                twice = next(name for name in names if names.count(name) > 1).decode()
                detail = f"the header {twice} was given more than once"
                return Refusal(code=Code.MALFORMED_REQUEST, detail=detail)
        coding = self.headers.get(b"transfer-encoding")
        if coding is not None and coding.lower() != b"chunked":
            detail = "the only transfer coding is chunked"
            return Refusal(code=Code.NOT_IMPLEMENTED, detail=detail)
        return None

    def answer(self, ready: EncodedAnswer, *, is_private: bool = True) -> Awaitable[None]:
        """Send an encoded answer. One that is not private brings its own ``Cache-Control``."""
        return self._finish(ready.status, ready.body, ready.headers, is_private=is_private)

    async def refuse(self, refusal: Refusal) -> None:
        """Send a problem document."""
        await self._finish(*answer_parts(refusal, self.request_id))
        if refusal.code is Code.OVERLOADED:
            # A client that retries at once would only be refused again: stop reading from it.
            rest = self.scope.get("extensions", _NO_EXTENSIONS).get(REST)
            if rest is not None:
                rest()

    async def _finish(
        self,
        status: int,
        body: bytes,
        headers: list[tuple[bytes, bytes]] | None,
        *,
        is_private: bool = True,
    ) -> None:
        take = self.scope.get("extensions", _NO_EXTENSIONS).get(ANSWER)
        if headers is None:
            if take is not None and len(body) <= PART_BYTES and self.scope["method"] != "HEAD":
                head = _JSON_HEAD % (len(body), self.request_id.encode())
                if take(status, head, body):
                    self._observe(time.perf_counter() - self._began_s, status)
                    return
            headers = [(b"content-type", _JSON)]
        headers.append((b"content-length", b"%d" % len(body)))
        headers.append((b"x-request-id", self.request_id.encode()))
        headers.extend(_HARDENING if is_private else _HARDENING[:1])
        if self.scope["method"] == "HEAD":
            body = b""
        if take is None or len(body) > PART_BYTES or not take(status, headers, body):
            await self.send({"type": "http.response.start", "status": status, "headers": headers})
            # Each send waits until the client has read the parts before it.
            for begin in range(0, max(1, len(body)), PART_BYTES):
                part, more = body[begin : begin + PART_BYTES], begin + PART_BYTES < len(body)
                await self.send({"type": "http.response.body", "body": part, "more_body": more})
        self._observe(time.perf_counter() - self._began_s, status)

    async def stream(self, stream: Stream, check: Check) -> None:
        """Send parts until they end, or the client disconnects or is too slow.

        ``check`` is called every second, also while a slow client blocks sending; an exception of
        it ends the stream.
        """
        prepare = self.scope.get("extensions", _NO_EXTENSIONS).get(STREAM)
        cut = _not_cut if prepare is None else prepare()
        try:
            headers = [
                (b"content-type", stream.content_type),
                (b"x-request-id", self.request_id.encode()),
                (b"x-accel-buffering", b"no"),
                *_HARDENING,
            ]
            self.is_begun = True
            await self.send({"type": "http.response.start", "status": 200, "headers": headers})
            if self.scope["method"] != "HEAD":
                try:
                    await self.unless_gone(self._pump(stream), check=check)
                except RequestRefused:
                    if cut():
                        return
            await self.send({"type": "http.response.body", "body": b""})
        finally:
            self._observe(time.perf_counter() - self._began_s, 200)

    async def _pump(self, stream: Stream) -> None:
        async with aclosing(stream.parts) as parts:
            async for part in parts:
                # Waits while the client is behind; the protocol disconnects one that stays behind.
                await self.send({"type": "http.response.body", "body": part, "more_body": True})

    def whole_body(self) -> bytes | None:
        """The body, if all of it has arrived and nothing of it was read; else ``None``."""
        offer = self.scope.get("extensions", _NO_EXTENSIONS).get(BODY)
        body: bytes | None = None if offer is None else offer()
        return body

    def when_gone(self, then: Callable[[], object]) -> None:
        """Have ``then`` called when the client disconnects. Only our server supports it.

        On another server the work of a disconnected client is finished.
        """
        offer = self.scope.get("extensions", _NO_EXTENSIONS).get(GONE)
        if offer is not None:
            offer(then)

    async def unless_gone(self, work: Awaitable[_Result], *, check: Check | None = None) -> _Result:
        """Await ``work``; cancel it when the client disconnects, and raise ``ClientGone``.

        ``check`` is called every second; its exception cancels the work as well, and is raised.
        """
        scope = CancelScope(check)
        listening: asyncio.Task[None] | None = None
        offer = self.scope.get("extensions", _NO_EXTENSIONS).get(GONE)
        if offer is None:
            listening = asyncio.create_task(self._listen(scope))
        else:
            offer(scope.leave)
        try:
            return await scope.over(work)
        finally:
            scope.end()
            if listening is not None:
                listening.cancel()

    async def _listen(self, scope: CancelScope) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        scope.leave()


def _not_cut() -> bool:
    return False


class CancelScope(TaskCancellation):
    """Cancels the work of the current task when the client disconnects or a check fails."""

    __slots__ = ("_check", "_checking", "_is_over", "_timer", "_why")

    def __init__(self, check: Check | None) -> None:
        super().__init__()
        self._is_over = False
        self._why: BaseException | None = None
        self._check = check
        self._checking: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._set_timer()

    async def over(self, work: Awaitable[_Result]) -> _Result:
        """Await the work. If this scope cancelled it, raise the reason."""
        try:
            return await work
        except asyncio.CancelledError:
            if self._why is None or not self.take_back():
                raise
            # The error refers to this frame. A reference back would be a cycle, and hold the
            # request until the garbage collector runs.
            why, self._why = self._why, None
            try:
                raise why from None
            finally:
                del why

    def leave(self) -> None:
        """Cancel the work: the client has disconnected."""
        self._stop(ClientGone())

    def end(self) -> None:
        """Stop watching: the work has ended."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._checking is not None:
            self._checking.cancel()
        self._timer = self._checking = None

    def _set_timer(self) -> None:
        if self._check is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_CHECK_S, self._look, self._check)

    def _look(self, check: Check) -> None:
        checking = check()
        if checking is None:
            self._set_timer()
            return
        self._checking = asyncio.ensure_future(checking)
        self._checking.add_done_callback(self._looked)

    def _looked(self, checking: asyncio.Future[None]) -> None:
        if checking.cancelled():
            return
        error = checking.exception()
        if error is None:
            self._set_timer()
        else:
            self._stop(error)

    def _stop(self, why: BaseException) -> None:
        if self._why is None and not self._is_over:
            self._why = why
            self.cancel_task()


class ClientGone(Exception):
    """The client has disconnected, so there is no answer to send."""
