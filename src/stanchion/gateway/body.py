"""Bodies and queries: read within bounds of size and memory, decoded, and checked.

``Bodies`` reads a body and refuses one that is too large: by its declared length before a byte is
read, otherwise as soon as it exceeds the limit or its tenant's share of the memory for all bodies.
(The endpoint limits how long it may take.)
``decoded`` returns a body as the route's type, ``read_query`` a query string; both raise
``RequestRefused`` with the place of the fault. ``check_value`` bounds the size, depth and integers
of values that have no schema.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Generator, Hashable, Iterable, Iterator, Sequence
from datetime import datetime
from itertools import chain
from typing import Any, Final, TypeVar, cast
from urllib.parse import unquote_to_bytes

import msgspec

from stanchion.core.faults import Fault
from stanchion.core.json_value import JsonValue
from stanchion.core.limits import JSON_DEPTH_MAX, LABEL_CHARS_MAX, LABELS_MAX
from stanchion.core.model import TenantId
from stanchion.gateway.body_cost import AS_ZEROS, why_costly
from stanchion.gateway.body_faults import (
    NAMED_CHARS,
    TIME_WANTED,
    TOO_DEEP,
    InvalidJson,
    MalformedJson,
    explain_text,
    why_not,
    with_whole_numbers,
)
from stanchion.gateway.exchange import ClientGone, Message, Receive
from stanchion.gateway.load import READ_BYTES, TENANT_SHARE, ByteTurns
from stanchion.gateway.options import GatewayOptions
from stanchion.gateway.problems import Refusal, RequestRefused, invalid, invalid_member
from stanchion.gateway.route import Call
from stanchion.wire.identifiers import LABEL_NAME_PATTERN, LABEL_PATTERN
from stanchion.wire.problems import Code

_Result = TypeVar("_Result")


class Bodies:
    """Reads bodies, and bounds the memory of all of them together, and of each tenant's."""

    def __init__(self, options: GatewayOptions) -> None:
        self._options = options
        self._held_bytes = 0
        self._by_tenant: dict[TenantId, int] = {}
        self.reading = 0
        """How many requests wait for their clients to send a body, or the rest of one."""
        self._turns = ByteTurns()

    async def read(
        self,
        receive: Receive,
        declared: bytes | None,
        tenant: TenantId | None,
        *,
        bytes_max: int | None = None,
    ) -> bytes:
        """The whole body. The caller must report its end with ``done``.

        Raises ``RequestRefused``, and ``ClientGone`` if the client disconnects.
        """
        if bytes_max is None:
            bytes_max = self._options.body_bytes_max
        if declared is not None:
            _refuse_declared(declared, bytes_max)
        self.reading += 1
        try:
            message = await _part(receive)
            first: bytes = message.get("body", b"")
            if message.get("more_body", False):
                return await self._rest(receive, first, tenant, bytes_max)
        finally:
            self.reading -= 1
        _refuse_large(len(first), bytes_max)
        self._hold(0, len(first), tenant)
        return first

    def take(self, whole: bytes, tenant: TenantId | None, *, bytes_max: int | None = None) -> bytes:
        """``read`` for a body that has arrived already."""
        _refuse_large(len(whole), self._options.body_bytes_max if bytes_max is None else bytes_max)
        self._hold(0, len(whole), tenant)
        return whole

    def done(self, size: int, tenant: TenantId | None) -> None:
        """A body of this tenant is no longer in use."""
        self._held_bytes -= size
        if tenant is not None:
            left = self._by_tenant.get(tenant, 0) - size
            if left:
                self._by_tenant[tenant] = left
            else:
                self._by_tenant.pop(tenant, None)

    async def _rest(
        self, receive: Receive, first: bytes, tenant: TenantId | None, bytes_max: int
    ) -> bytes:
        parts = [first]
        size, held = len(first), 0
        is_whole = False
        try:
            while True:
                _refuse_large(size, bytes_max)
                self._hold(held, size, tenant)
                held = size
                if is_whole:
                    held = 0  # from here on the caller reports it with done
                    return b"".join(parts)
                if size > _SLOW_BYTES:
                    await self._turns.turn(READ_BYTES, tenant)
                message = await _part(receive)
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                is_whole = not message.get("more_body", False)
        finally:
            self.done(held, tenant)

    def _hold(self, held: int, size: int, tenant: TenantId | None) -> None:
        """Count a body of which ``held`` bytes are counted already. Raises ``RequestRefused``."""
        more, options = size - held, self._options
        if self._held_bytes + more > options.bodies_bytes_max:
            detail = "too many large bodies at once"
            raise RequestRefused(Refusal(code=Code.OVERLOADED, detail=detail, retry_after_ms=1_000))
        if tenant is not None:
            of_tenant = self._by_tenant.get(tenant, 0)
            # A single body never exceeds the share.
            if of_tenant > held and of_tenant + more > options.bodies_bytes_max // TENANT_SHARE:
                detail = "the tenant has too many large bodies at once"
                code = Code.TENANT_OVERLOADED
                raise RequestRefused(Refusal(code=code, detail=detail, retry_after_ms=1_000))
            self._by_tenant[tenant] = of_tenant + more
        self._held_bytes += more


_SLOW_BYTES: Final = 32 * 1024
"""The rest of a body of which so much has come is read in turns: all that wait in their sockets at
the same time would be read in one iteration of the event loop."""
_LENGTH_DIGITS_MAX: Final = 18


def _refuse_declared(declared: bytes, bytes_max: int) -> None:
    if not declared.isdigit():
        detail = "Content-Length is not a number"
        raise RequestRefused(Refusal(code=Code.MALFORMED_REQUEST, detail=detail))
    _refuse_large(int(declared[:_LENGTH_DIGITS_MAX]), bytes_max)


def _refuse_large(size: int, bytes_max: int) -> None:
    if size > bytes_max:
        detail = f"the body has more than {bytes_max} bytes"
        raise RequestRefused(Refusal(code=Code.BODY_TOO_LARGE, detail=detail))


async def _part(receive: Receive) -> Message:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message


def decoded(
    body: bytes,
    decoder: msgspec.json.Decoder[Any],
    *,
    is_checked: bool = False,
) -> Any:  # noqa: ANN401 - the route's own type
    """The body as the route's type. Raises ``RequestRefused`` with the place of the fault.

    ``is_checked``: ``refuse_costly`` has accepted it.
    """
    try:
        return decode_json(body, decoder, is_checked=is_checked)
    except MalformedJson as error:
        detail = f"the body is not JSON: {error}"
        raise RequestRefused(Refusal(code=Code.MALFORMED_JSON, detail=detail)) from None
    except InvalidJson as error:
        raise RequestRefused(invalid((error.fault,), str(error.fault))) from None


def refuse_costly(body: bytes) -> Iterator[None]:
    """Raise ``RequestRefused`` if decoding the body could block the event loop for over 20 ms.

    In pieces of 15 ms at most, and apart from ``decoded``: others are to be served in between.
    """
    if len(body) > _SMALL_BYTES:
        costly = yield from why_costly(body)
        if costly is not None:
            fault = Fault("", costly)
            raise RequestRefused(invalid((fault,), str(fault)))


_INT_MIN: Final = -(2**63)
_INT_MAX: Final = 2**63 - 1
_MANY_DIGITS: Final = b"0" * 19

_SMALL_BYTES: Final = 2 * 1024
"""A body up to this size is decoded in a few milliseconds, whatever it contains."""


def decode_json(
    body: bytes, decoder: msgspec.json.Decoder[object], *, is_checked: bool = False
) -> object:
    """The body as the decoder's type. Raises ``MalformedJson`` or ``InvalidJson`` only."""
    if len(body) > _SMALL_BYTES and not is_checked:
        costly = _at_once(why_costly(body))
        if costly is not None:
            raise InvalidJson(Fault("", costly))
    try:
        value = _decoded(body, decoder)
        if len(body) <= _REPEATS_BYTES_MAX:
            _refuse_repeated(body)
    except RecursionError:  # of any of the passes: each may go less deep than the one before it
        raise InvalidJson(Fault("", TOO_DEEP)) from None
    return value


def _decoded(body: bytes, decoder: msgspec.json.Decoder[object]) -> object:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        return with_whole_numbers(body, decoder, error)
    except msgspec.DecodeError as error:
        explain_text(body, str(error))
    except UnicodeDecodeError:
        raise MalformedJson("the body is not UTF-8") from None


_REPEATS_BYTES_MAX: Final = 16 * 1024
"""In larger bodies the last of several members with one name counts: to find them takes long."""
_SPACED = re.compile(rb'"[ \t\r\n]+:')


def _refuse_repeated(body: bytes) -> None:
    """Raise ``InvalidJson`` if an object has two members with one name.

    First the cheap reason why there are none: every member has a colon, also one that is given
    again, so that there are none if the value has as many members as the text has colons. Otherwise
    some are perhaps in texts: then those behind a quote count.
    """
    try:
        members = _members(msgspec.json.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError):
        members = -1  # the fault is in a part of which the decoder has left the text as it is
    if members == body.count(b":"):
        return
    if b"\\" not in body and _SPACED.search(body) is None and members == body.count(b'":'):
        return
    # Integers are not read: Python refuses those with more than 4,300 digits.
    json.loads(body.decode("utf-8", "replace"), object_pairs_hook=_once, parse_int=str)


def _members(value: JsonValue) -> int:
    """How many members all objects in this value have."""
    count, holders = 0, [value]
    for holder in holders:
        inside: Iterable[JsonValue] = ()
        if type(holder) is dict:
            count += len(holder)
            inside = holder.values()
        elif type(holder) is list:
            inside = holder
        # The loop goes on with them.
        holders += [each for each in inside if type(each) is dict or type(each) is list]
    return count


def _once(members: list[tuple[str, object]]) -> None:
    names = [name for name, _ in members]
    if len(set(names)) < len(names):
        name = next(each for each in names if names.count(each) > 1)
        raise InvalidJson(Fault(name[:NAMED_CHARS], "given more than once"))


def _at_once(pieces: Generator[None, None, _Result]) -> _Result:
    """The result of work that is divided into pieces, without a pause."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: _Result = end.value
            return result


def is_suspect(body: bytes) -> bool:
    """Whether a value in this text could be too deep or too large. Never wrongly ``False``."""
    return body.count(b"{") + body.count(b"[") > JSON_DEPTH_MAX or _MANY_DIGITS in body.translate(
        AS_ZEROS
    )


def are_suspect(texts: Sequence[bytes], joined: bytes) -> bool:
    """Whether one of the texts is suspect; ``joined`` has all of them, separated by commas."""
    if _MANY_DIGITS in joined.translate(AS_ZEROS):
        return True
    # Each object and list has two brackets.
    return any(
        len(text) > 2 * JSON_DEPTH_MAX and text.count(b"{") + text.count(b"[") > JSON_DEPTH_MAX
        for text in texts
    )


def fault_in(value: JsonValue, path: str) -> Fault | None:
    """The fault of a value without a schema: nested too deep, or an integer beyond 64 bits."""
    return fault_among((value,), path)


def fault_among(members: Sequence[JsonValue], path: str) -> Fault | None:
    """The fault of the first such value that has one."""
    # Level by level and without a loop over single values, for speed: there may be 100,000.
    for depth in range(JSON_DEPTH_MAX + 1):
        kinds = set(map(type, members))
        if int in kinds:
            integers = _of_type(int, members, kinds)
            if not _INT_MIN <= min(integers) <= max(integers) <= _INT_MAX:
                return Fault(path, "holds an integer beyond 64 bits")
        if dict not in kinds and list not in kinds:
            return None
        if depth == JSON_DEPTH_MAX:
            break
        lists = _of_type(list, members, kinds)
        objects = [each.values() for each in _of_type(dict, members, kinds)]
        members = [*chain.from_iterable(lists), *chain.from_iterable(objects)]
    return Fault(path, TOO_DEEP)


def _of_type(
    kind: type[_Result], members: Sequence[Any], kinds: set[type[Any]]
) -> Sequence[_Result]:
    """The members of this type; ``kinds`` are the types of all. Often all have the same."""
    if kind not in kinds:
        return ()
    return members if len(kinds) == 1 else [each for each in members if type(each) is kind]


_GROWTH_MAX: Final = 5
"""How many times longer a number may become when it is encoded again: ``1e15``."""


def check_value(
    call: Call[Any, Any],
    path: str,
    value: JsonValue,
    *,
    bytes_max: int,
    part: bytes | None = None,
    is_walked: bool = False,
) -> None:
    """Raise ``RequestRefused`` for a value too large, too deep, or with an integer over 64 bits.

    ``part`` is the part of the body that has the value, if it is a small one. ``is_walked``: it is
    known not to be too deep and to have no such integer.
    """
    body_bytes, suspect = call.body_bytes, call.is_suspect and not is_walked
    if part is not None:
        body_bytes, suspect = len(part), suspect and is_suspect(part)
    # The size first: a value within it is walked in a few milliseconds.
    if body_bytes * _GROWTH_MAX > bytes_max:
        size = len(msgspec.json.encode(value))
        if size > bytes_max:
            wrong = f"{size} bytes long; at most {bytes_max} are allowed"
            raise RequestRefused(invalid_member(path, wrong))
    if suspect:
        fault = fault_in(value, path)
        if fault is not None:
            raise RequestRefused(invalid((fault,), str(fault)))


def checked_labels(labels: dict[str, Any]) -> dict[str, str]:
    """The labels of a request. Raises ``RequestRefused`` that names the faulty one."""
    if len(labels) > LABELS_MAX:
        wrong = f"{len(labels)} labels; at most {LABELS_MAX} are allowed"
        raise RequestRefused(invalid_member("labels", wrong))
    for name, value in labels.items():
        if _LABEL_NAME.match(name) is None:
            raise RequestRefused(invalid_member(f"labels.{name[:NAMED_CHARS]}", _NOT_A_NAME))
        if not isinstance(value, str) or _LABEL.match(value) is None:
            raise RequestRefused(invalid_member(f"labels.{name}", _NOT_A_VALUE))
    return labels


_LABEL = re.compile(LABEL_PATTERN)
_LABEL_NAME = re.compile(LABEL_NAME_PATTERN)
_NOT_A_NAME: Final = (
    f"the name of a label has 1 to {LABEL_CHARS_MAX} visible characters, and no colon"
)
_NOT_A_VALUE: Final = f"the value must be text of 1 to {LABEL_CHARS_MAX} visible characters"
_PARAMETERS_MAX: Final = 50


def read_query(text: bytes, shape: type[Any]) -> Any:  # noqa: ANN401 - the route's own type
    """The parameters as the route's type. Raises ``RequestRefused`` with the parameter's name."""
    given: dict[str, Any] = {}
    repeatable = _repeatable(cast("Hashable", shape))
    parts = text.split(b"&")
    if len(parts) > _PARAMETERS_MAX:
        raise RequestRefused(invalid_member("", f"more than {_PARAMETERS_MAX} query parameters"))
    for part in filter(None, parts):
        name, _, value = part.partition(b"=")
        key = _text(name, "a query parameter's name")
        if key in repeatable:
            given.setdefault(key, []).append(_text(value, key))
        elif key in given:
            raise RequestRefused(invalid_member(key, "given more than once"))
        else:
            given[key] = _text(value, key)
    try:
        query = msgspec.convert(given, shape, strict=False)
    except msgspec.ValidationError as error:
        fault = _as_parameter(why_not(error, shape))
        raise RequestRefused(invalid((fault,), f"query: {fault}")) from None
    for key, typed in given.items():
        value = getattr(query, key)
        # The decoder reads the text ``null`` as None; a parameter that is given must have a value.
        if value is None:
            raise RequestRefused(invalid_member(key, "must not be null"))
        # It reads 1e2 and 1.0 as whole numbers.
        if type(value) is int and _WHOLE_NUMBER.fullmatch(typed) is None:
            raise RequestRefused(invalid_member(key, "must be a whole number, in digits"))
        # It reads numbers as times, also 1e-5.
        if isinstance(value, datetime) and _YEAR.match(typed) is None:
            raise RequestRefused(invalid_member(key, TIME_WANTED))
    return query


_WHOLE_NUMBER = re.compile("-?[0-9]+")
_YEAR = re.compile("[0-9]{4}-")


@functools.cache
def _repeatable(shape: Hashable) -> frozenset[str]:
    """The parameters that may be given several times: those with a list of values."""
    return frozenset(
        field.encode_name
        for field in msgspec.structs.fields(shape)  # type: ignore[arg-type]  # a struct
        if isinstance(field.default, tuple)
    )


def _text(encoded: bytes, path: str) -> str:
    try:
        return unquote_to_bytes(encoded.replace(b"+", b" ")).decode("utf-8")
    except UnicodeDecodeError:
        raise RequestRefused(invalid_member(path, "not UTF-8")) from None


def _as_parameter(fault: Fault) -> Fault:
    known = "not a member", "not a query parameter"
    return Fault(fault.path, fault.message.replace(*known))
