"""Requests as bytes, addresses, and responses parsed however the network cuts them."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from importlib.metadata import version

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from stanchion.transport import parser as parsing
from stanchion.transport.messages import (
    Address,
    MalformedResponse,
    Request,
    encode_request,
    parse_address,
)
from stanchion.transport.parser import BODY_BYTES_MAX, ResponseParser


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8420", Address("127.0.0.1", 8420, is_tls=False, prefix="")),
        ("http://server", Address("server", 80, is_tls=False, prefix="")),
        ("https://server/", Address("server", 443, is_tls=True, prefix="")),
        ("https://server/api/", Address("server", 443, is_tls=True, prefix="/api")),
        ("http://a_b.svc.cluster.local.", Address("a_b.svc.cluster.local.", 80, False, "")),
        ("http://[::1]:80", Address("::1", 80, is_tls=False, prefix="")),
    ],
)
def test_a_servers_url_is_read(url: str, expected: Address) -> None:
    assert parse_address(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "",
        "server:8420",
        "ftp://server",
        "http://",
        "http://u:p@server",
        "http://s?q=1",
        "http://s#f",
        "http://s:99999",
        "http://s:x",
        "http://a..b:8420",
        "http://.a",
        f"http://{'a' * 64}.example",
        "http://münchen:8420",
    ],
)
def test_what_is_no_servers_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"URL|[Pp]ort"):
        parse_address(url)


@pytest.mark.parametrize("password", ["hush", "hu/sh", "/hush", "h@ush", "h#ush", "h?ush", "h ush"])
@pytest.mark.parametrize("form", ["http://joe:{}@server", "joe:{}@server"])
def test_a_refused_url_does_not_show_its_password(form: str, password: str) -> None:
    with pytest.raises(ValueError, match="server") as refused:
        parse_address(form.format(password))
    assert "ush" not in str(refused.value)
    assert "joe" not in str(refused.value)


POST = Request(name="t", method="POST", path="/v1/x", timeout_s=1, is_repeatable=True)


def test_a_request_is_written_down() -> None:
    to = Address("::1", 8420, is_tls=False, prefix="/api")
    request = replace(POST, headers=(("X-Y", "z"),), body=b"{}")
    agent = f"User-Agent: stanchion/{version('stanchion')}\r\n".encode()
    assert encode_request(request, to) == (
        b"POST /api/v1/x HTTP/1.1\r\nHost: [::1]:8420\r\n"
        + agent
        + b"X-Y: z\r\nContent-Length: 2\r\n\r\n{}"
    )


def test_a_post_without_a_body_says_so_and_a_get_says_nothing() -> None:
    to = Address("s", 80, is_tls=False, prefix="")
    assert b"Content-Length: 0\r\n" in encode_request(POST, to)
    assert b"Content-Length" not in encode_request(replace(POST, method="GET"), to)


@pytest.mark.parametrize("value", ["a\r\nX: y", "a\nb", "ä", "\0", "\x7f"])
def test_no_value_can_begin_a_header_of_its_own(value: str) -> None:
    to = Address("s", 80, is_tls=False, prefix="")
    with pytest.raises(ValueError, match="X-Y"):
        encode_request(replace(POST, headers=(("X-Y", value),)), to)
    with pytest.raises(ValueError, match="cannot be sent"):
        encode_request(replace(POST, path=f"/v1/{value}"), to)


# ── Responses ────────────────────────────────────────────────────────────────────────────────────

BODY = b'{"jobs": []}'
RESPONSES = {
    "length": b"HTTP/1.1 200 OK\r\nX-Thing:  a: b \r\nContent-Length: 12\r\n\r\n" + BODY,
    "chunks": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\nX-Thing:  a: b \r\n\r\n"
        b'4;a=b\r\n{"jo\r\n8\r\nbs": []}\r\n0\r\nX-Thing: trailer\r\n\r\n'
    ),
    "interim": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nX-Thing: x\r\nLink: x\r\n\r\n"
        b"HTTP/1.1 200 OK\r\nx-thing: a: b\r\ncontent-length:12\r\n\r\n" + BODY
    ),
    "no reason": b"HTTP/1.1 200\r\nX-THING:a: b\r\nCONTENT-LENGTH: 12\r\n\r\n" + BODY,
}
CUTS = st.lists(st.integers(0, 150), max_size=6)


def _parsed(text: bytes, cuts: list[int]) -> ResponseParser:
    parser = ResponseParser()
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, end in zip(bounds, bounds[1:], strict=False):  # noqa: RUF007 - pieces, not pairs
        if start < end:
            assert not parser.is_done
            parser.feed(text[start:end])
    return parser


@pytest.mark.parametrize("name", RESPONSES)
@given(cuts=CUTS)
def test_a_response_is_complete_with_its_last_byte_however_it_is_cut(
    name: str, cuts: list[int]
) -> None:
    parser = _parsed(RESPONSES[name], cuts)
    assert (parser.status, parser.is_done, parser.can_reuse) == (200, True, True)
    assert parser.take_body() == BODY
    assert parser.headers["x-thing"] == "a: b"
    assert "link" not in parser.headers


@pytest.mark.parametrize("name", RESPONSES)
def test_no_response_is_complete_before_its_last_byte(name: str) -> None:
    text = RESPONSES[name]
    for end in range(1, len(text)):
        parser = _parsed(text[:end], [])
        assert not parser.is_done
        with pytest.raises(EOFError):
            parser.feed(b"")


@given(body=st.binary(max_size=200), size=st.integers(1, 50), cut=st.integers(1, 20))
def test_any_chunks_are_put_together_however_they_are_cut(body: bytes, size: int, cut: int) -> None:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    chunks = b"".join(b"%X\r\n%b\r\n" % (len(part), part) for part in parts)
    whole = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    parser, read = ResponseParser(), b""
    for at in range(0, len(whole), cut):
        assert not parser.is_done
        parser.feed(whole[at : at + cut])
        read += parser.take_body()
    assert (read, parser.is_done, parser.can_reuse) == (body, True, True)


@given(cuts=CUTS)
def test_a_response_without_a_length_ends_with_its_connection(cuts: list[int]) -> None:
    parser = _parsed(b"HTTP/1.1 503 Busy\r\n\r\nbye", cuts)
    assert not parser.is_done
    parser.feed(b"")
    assert (parser.is_done, parser.can_reuse, parser.status) == (True, False, 503)
    assert parser.take_body() == b"bye"


@pytest.mark.parametrize("status", [204, 304])
def test_some_responses_have_no_body_whatever_they_say(status: int) -> None:
    parser = _parsed(f"HTTP/1.1 {status} X\r\ncontent-length: 5\r\n\r\n".encode(), [])
    assert (parser.is_done, parser.status, parser.take_body()) == (True, status, b"")


@pytest.mark.parametrize(
    "text",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\nmore",
        b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\nHTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\nmore",
    ],
)
def test_a_connection_that_ends_or_sends_too_much_is_not_used_again(text: bytes) -> None:
    parser = _parsed(text, [])
    assert (parser.status, parser.is_done, parser.can_reuse) == (200, True, False)
    assert parser.take_body() == b""


def test_bytes_that_follow_a_complete_response_make_the_connection_unusable() -> None:
    parser = _parsed(RESPONSES["length"], [])
    parser.feed(b"more")
    assert (parser.is_done, parser.can_reuse, parser.take_body()) == (True, False, BODY)


@pytest.mark.parametrize(
    "text",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/2.0 200 OK\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 999 X\r\n\r\n",
        b"HTTP/1.1 101 X\r\nUpgrade: y\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nabcd",
        b"HTTP/1.1 200 OK\r\n: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nname : x\r\n\r\n",
        b"x" * 70_000,
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"1" * 2_000,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1;" + b"x" * 70_000,
    ],
    ids=lambda text: repr(text[-30:]),
)
def test_what_is_no_response_is_refused(text: bytes) -> None:
    with pytest.raises(MalformedResponse):
        _parsed(text, [])


@pytest.mark.parametrize("kind", ["chunks", "up to the end"])
def test_a_body_is_bounded_also_if_it_does_not_say_its_length(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parsing, "BODY_BYTES_MAX", 100)
    assert BODY_BYTES_MAX == 64 * 1024 * 1024
    coding = b"transfer-encoding: chunked\r\n" if kind == "chunks" else b""
    size = b"fffffffff\r\n" if kind == "chunks" else b""
    head = b"HTTP/1.1 200 OK\r\n" + coding
    parser = _parsed(head + b"\r\n" + size + b"x" * 100, [])
    with pytest.raises(MalformedResponse, match="too large"):
        parser.feed(b"x")
    stream = _parsed(head + b"content-type: text/event-stream\r\n\r\n" + size, [])
    stream.feed(b"x" * 101)
    assert len(stream.take_body()) == 101


@given(st.binary(max_size=400), CUTS)
@pytest.mark.parametrize(
    "head",
    [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"],
)
def test_any_bytes_are_parsed_or_refused(head: bytes, data: bytes, cuts: list[int]) -> None:
    text = head + data
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parser = ResponseParser()
    with suppress(MalformedResponse, EOFError):
        for start, end in zip(bounds, bounds[1:], strict=False):  # noqa: RUF007 - pieces, not pairs
            if start < end:
                parser.feed(text[start:end])
        parser.feed(b"")


def test_a_parser_that_is_done_needs_no_garbage_collection() -> None:
    gc.disable()
    try:
        parser = _parsed(RESPONSES["length"], [])
        gone = weakref.ref(parser)
        del parser
        assert gone() is None
    finally:
        gc.enable()
