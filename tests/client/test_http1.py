"""HTTP/1.1 as bytes: it does not matter where the network cuts them."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from stanchion.client.exchange import Request
from stanchion.client.http1 import Address, Malformed, ReplyParser, address, written

HEADS = {
    "length": b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nX-Thing:  a: b \r\n\r\n",
    "chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\nX-Thing:  a: b \r\n\r\n",
}


def chunked(body: bytes, size: int) -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%X\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\nt: x\r\n\r\n"


@given(body=st.binary(max_size=200), size=st.integers(1, 50), cut=st.integers(1, 20))
@pytest.mark.parametrize("kind", HEADS)
def test_an_answer_reads_the_same_however_it_is_cut(
    kind: str, body: bytes, size: int, cut: int
) -> None:
    whole = (
        HEADS[kind] % len(body) + body if kind == "length" else HEADS[kind] + chunked(body, size)
    )
    parser, read = ReplyParser(), b""
    for at in range(0, len(whole), cut):
        assert not parser.is_done
        read += parser.feed(whole[at : at + cut])
    assert (read, parser.is_done, parser.can_go_on) == (body, True, True)
    assert parser.head is not None
    assert (parser.head.status, parser.head.headers["x-thing"]) == (200, "a: b")


@given(st.binary(max_size=400))
@pytest.mark.parametrize(
    "head",
    [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"],
)
def test_no_bytes_at_all_make_it_fail_otherwise_than_it_says(head: bytes, data: bytes) -> None:
    parser, fed = ReplyParser(), head + data
    with suppress(Malformed, EOFError):
        while not parser.is_done:
            parser.feed(fed)
            fed = b""


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8420", Address("127.0.0.1", 8420, is_tls=False, prefix="")),
        ("http://server", Address("server", 80, is_tls=False, prefix="")),
        ("https://server/", Address("server", 443, is_tls=True, prefix="")),
        ("https://server/api/", Address("server", 443, is_tls=True, prefix="/api")),
        ("http://[::1]:80", Address("::1", 80, is_tls=False, prefix="")),
    ],
)
def test_a_servers_url_is_read(url: str, expected: Address) -> None:
    assert address(url) == expected


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
    ],
)
def test_what_is_no_servers_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"URL|[Pp]ort"):
        address(url)


POST = Request(name="t", method="POST", path="/v1/x", timeout_s=1, is_repeatable=True)


def test_a_request_is_written_down() -> None:
    to = Address("::1", 8420, is_tls=False, prefix="/api")
    request = replace(POST, headers=(("X-Y", "z"),), body=b"{}")
    assert written(request, to) == (
        b"POST /api/v1/x HTTP/1.1\r\nHost: [::1]:8420\r\nUser-Agent: stanchion\r\nX-Y: z\r\n"
        b"Content-Length: 2\r\n\r\n{}"
    )


def test_a_post_without_a_body_says_so_and_a_get_says_nothing() -> None:
    to = Address("s", 80, is_tls=False, prefix="")
    assert b"Content-Length: 0\r\n" in written(POST, to)
    assert b"Content-Length" not in written(replace(POST, method="GET"), to)


@pytest.mark.parametrize("value", ["a\r\nX: y", "a\nb", "ä", "\0", "\x7f"])
def test_no_value_can_begin_a_header_of_its_own(value: str) -> None:
    to = Address("s", 80, is_tls=False, prefix="")
    with pytest.raises(ValueError, match="X-Y"):
        written(replace(POST, headers=(("X-Y", value),)), to)
    with pytest.raises(ValueError, match="cannot be sent"):
        written(replace(POST, path=f"/v1/{value}"), to)
