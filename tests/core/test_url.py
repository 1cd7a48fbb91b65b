"""URLs as they are shown: hosts and a path, never a part of the user info."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stanchion.core.url import shown_url

_SCHEMES = ("redis", "rediss", "redis+cluster", "redis+sentinel", "nats", "tls", "http", "https")


@given(st.sampled_from(_SCHEMES), st.text(), st.text())
def test_no_part_of_the_user_info_is_shown(scheme: str, user: str, password: str) -> None:
    assert shown_url(f"{scheme}://{user}:{password}@cache:1/0") == f"{scheme}://***@cache:1/0"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("redis+cluster://a:1,b,[::1]:3", "redis+cluster://a:1,b,[::1]:3"),
        ("redis+sentinel://u:p@a,b/main/2", "redis+sentinel://***@a,b/main/2"),
        ("rediss://h?ssl_certfile=/x&ssl_password=hush", "rediss://h"),
        ("redis://h#hush", "redis://h"),
        ("nats://a:1,nats://b:2", "nats://a:1,nats://b:2"),
        ("nats://u:hush@a:1,nats://u:hush@b:2", "nats://***@b:2"),
        ("https://runs.example/base", "https://runs.example/base"),
        ("sqlite:/var/lib/a@b.db", "sqlite:/var/lib/a@b.db"),
        ("memory:", "memory:"),
        ("redis://user:hush", "(unreadable redis URL)"),
        ("redis://user:hu/sh", "(unreadable redis URL)"),
        ("redis://user:p%40hush", "(unreadable redis URL)"),
        ("redis:user:hush@host", "(unreadable redis URL)"),
        ("redis://u:p@ho st", "(unreadable redis URL)"),
        ("user:hush@host", "(unreadable URL)"),
        ("hush://host", "(unreadable URL)"),
        ("", "(unreadable URL)"),
    ],
)
def test_what_cannot_be_read_is_described(url: str, shown: str) -> None:
    assert shown_url(url) == shown
