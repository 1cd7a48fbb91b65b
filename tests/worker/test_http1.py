"""However an answer is cut into pieces, it is read as one; what is no answer is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stanchion.worker.http1 import Answer, AnswerReader, BadAnswer

BODY = b'{"jobs": []}'
ANSWERS = {
    "length": b"HTTP/1.1 200 OK\r\nServer: x\r\nContent-Length: 12\r\n\r\n" + BODY,
    "chunks": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        b'4;a=b\r\n{"jo\r\n8\r\nbs": []}\r\n0\r\nTrailer: x\r\n\r\n'
    ),
    "interim": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: x\r\n\r\n"
        b"HTTP/1.1 200 OK\r\ncontent-length:12\r\n\r\n" + BODY
    ),
    "no reason": b"HTTP/1.1 200\r\nCONTENT-LENGTH: 12\r\n\r\n" + BODY,
}
CUTS = st.lists(st.integers(0, 150), max_size=6)


def _read(text: bytes, cuts: list[int]) -> tuple[Answer | None, AnswerReader]:
    reader = AnswerReader()
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    answer = None
    for start, end in zip(bounds, bounds[1:], strict=False):  # noqa: RUF007 - pieces, not pairs
        if start < end:
            assert answer is None
            answer = reader.feed(text[start:end])
    return answer, reader


@pytest.mark.parametrize("name", ANSWERS)
@given(cuts=CUTS)
def test_an_answer_is_whole_with_its_last_byte_however_it_is_cut(
    name: str, cuts: list[int]
) -> None:
    answer, reader = _read(ANSWERS[name], cuts)
    assert answer == Answer(200, BODY)
    assert reader.is_reusable


@pytest.mark.parametrize("name", ANSWERS)
def test_no_answer_is_whole_before_its_last_byte(name: str) -> None:
    text = ANSWERS[name]
    for end in range(1, len(text)):
        answer, reader = _read(text[:end], [])
        assert answer is None
        assert reader.end() is None


@given(cuts=CUTS)
def test_an_answer_without_a_length_ends_with_its_connection(cuts: list[int]) -> None:
    answer, reader = _read(b"HTTP/1.1 503 Busy\r\n\r\nbye", cuts)
    assert answer is None
    assert reader.end() == Answer(503, b"bye")
    assert not reader.is_reusable


@pytest.mark.parametrize("status", [204, 304])
def test_some_answers_have_no_body_whatever_they_say(status: int) -> None:
    head = f"HTTP/1.1 {status} X\r\ncontent-length: 5\r\n\r\n".encode()
    assert AnswerReader().feed(head) == Answer(status, b"")


@pytest.mark.parametrize(
    "text",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\nHTTP/1.1 200 OK\r\n",
    ],
)
def test_a_connection_that_ends_or_says_too_much_is_not_used_again(text: bytes) -> None:
    answer, reader = _read(text, [])
    assert answer == Answer(200, b"")
    assert not reader.is_reusable


@pytest.mark.parametrize(
    "text",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nfffffffff\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nabcd",
        b"x" * 70_000,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"1" * 2_000,
    ],
    ids=lambda text: repr(text[-30:]),
)
def test_what_is_no_answer_is_refused(text: bytes) -> None:
    with pytest.raises(BadAnswer):
        _read(text, [])


@given(st.binary(max_size=200), CUTS)
def test_no_bytes_do_worse_than_to_be_refused(text: bytes, cuts: list[int]) -> None:
    for start in (
        b"",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding:chunked\r\n\r\n",
    ):
        reader = AnswerReader()
        try:
            bounds = [0, *sorted(cuts), len(start + text)]
            for a, b in zip(bounds, bounds[1:], strict=False):  # noqa: RUF007 - pieces, not pairs
                if reader.feed((start + text)[a:b]) is not None:
                    break
        except BadAnswer:
            pass
