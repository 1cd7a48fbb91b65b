"""Redis URLs: what they mean, and what is refused."""

from __future__ import annotations

import pytest

from stanchion.adapters.redis.address import (
    Address,
    Kind,
    Target,
    checked_namespace,
    read_url,
)
from stanchion.ports.errors import BackendRefused

_LOCAL = Address("127.0.0.1", 6379)


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("redis://127.0.0.1", Target(kind=Kind.SINGLE, addresses=(_LOCAL,))),
        ("redis://127.0.0.1:6379/", Target(kind=Kind.SINGLE, addresses=(_LOCAL,))),
        ("redis://127.0.0.1/3", Target(kind=Kind.SINGLE, addresses=(_LOCAL,), database=3)),
        ("redis://[::1]:7000", Target(kind=Kind.SINGLE, addresses=(Address("::1", 7000),))),
        (
            "rediss://me:p%40ss%3A@db.example:7",
            Target(
                kind=Kind.SINGLE,
                addresses=(Address("db.example", 7),),
                username="me",
                password="p@ss:",  # noqa: S106 - made up
                has_tls=True,
            ),
        ),
        (
            "redis://:secret@127.0.0.1",
            Target(kind=Kind.SINGLE, addresses=(_LOCAL,), password="secret"),  # noqa: S106 - made up
        ),
        (
            "redis+cluster://a:1,b:2,c",
            Target(
                kind=Kind.CLUSTER,
                addresses=(Address("a", 1), Address("b", 2), Address("c", 6379)),
            ),
        ),
        (
            "redis+sentinel://a,b:1/main/2",
            Target(
                kind=Kind.SENTINEL,
                addresses=(Address("a", 26379), Address("b", 1)),
                service="main",
                database=2,
            ),
        ),
    ],
)
def test_a_url_says_which_servers_are_meant(url: str, target: Target) -> None:
    assert read_url(url) == target


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:6379",
        "http://127.0.0.1",
        "redis+ring://127.0.0.1",
        "redis://",
        "redis://host:port",
        "redis://host:99999",
        "redis://a,b",
        "redis://host/one",
        "redis://host/1/2",
        "redis://host?timeout=3",
        "redis://host#fragment",
        "redis+cluster://a,,b",
        "redis+cluster://a,b/1",
        "redis+sentinel://a,b",
        "redis+sentinel://a/service/one",
    ],
)
def test_what_is_no_redis_url_is_refused(url: str) -> None:
    with pytest.raises(BackendRefused):
        read_url(url)


@pytest.mark.parametrize("url", ["redis://u:hush@a,b", "redis://u:hush@a/x", "redis://u:hush@:x"])
def test_a_refusal_does_not_repeat_the_password(url: str) -> None:
    with pytest.raises(BackendRefused) as refused:
        read_url(url)
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize("namespace", ["", "a{b", "a}b", "a b", "a\n"])
def test_a_namespace_that_would_break_keys_is_refused(namespace: str) -> None:
    with pytest.raises(BackendRefused):
        checked_namespace(namespace)


def test_a_plain_namespace_is_fine() -> None:
    assert checked_namespace("team:prod-2") == "team:prod-2"
