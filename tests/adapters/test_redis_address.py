"""Redis URLs: what they mean, and what is refused."""

from __future__ import annotations

import pytest

from stanchion.adapters.redis.address import (
    RedisTarget,
    ServerAddress,
    ServerLayout,
    checked_namespace,
    read_url,
)
from stanchion.ports.errors import BackendRefused

_LOCAL = ServerAddress("127.0.0.1", 6379)


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("redis://127.0.0.1", RedisTarget(kind=ServerLayout.SINGLE, addresses=(_LOCAL,))),
        ("redis://127.0.0.1:6379/", RedisTarget(kind=ServerLayout.SINGLE, addresses=(_LOCAL,))),
        (
            "redis://127.0.0.1/3",
            RedisTarget(kind=ServerLayout.SINGLE, addresses=(_LOCAL,), database=3),
        ),
        (
            "redis://[::1]:7000",
            RedisTarget(kind=ServerLayout.SINGLE, addresses=(ServerAddress("::1", 7000),)),
        ),
        (
            "rediss://me:p%40ss%3A@db.example:7",
            RedisTarget(
                kind=ServerLayout.SINGLE,
                addresses=(ServerAddress("db.example", 7),),
                username="me",
                password="p@ss:",  # noqa: S106 - made up
                has_tls=True,
            ),
        ),
        (
            "redis://:secret@127.0.0.1",
            RedisTarget(kind=ServerLayout.SINGLE, addresses=(_LOCAL,), password="secret"),  # noqa: S106 - made up
        ),
        (
            "redis+cluster://a:1,b:2,c",
            RedisTarget(
                kind=ServerLayout.CLUSTER,
                addresses=(ServerAddress("a", 1), ServerAddress("b", 2), ServerAddress("c", 6379)),
            ),
        ),
        (
            "redis+sentinel://a,b:1/main/2",
            RedisTarget(
                kind=ServerLayout.SENTINEL,
                addresses=(ServerAddress("a", 26379), ServerAddress("b", 1)),
                service="main",
                database=2,
            ),
        ),
    ],
)
def test_a_url_says_which_servers_are_meant(url: str, target: RedisTarget) -> None:
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


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:hush@a,b",
        "redis://u:hush@a/x",
        "redis://u:hush@:x",
        "redis://u:hush/more@host",
        "redis://u:more/hush@host/0",
        "redis://u:more?hush@host",
        "redis://u:more#hush@host",
        "redis://u:hush",
        "redis://host?hush=1",
        "redis://[hush@host",
        "hush:hush@host",
    ],
)
def test_a_refusal_does_not_repeat_a_part_of_the_url(url: str) -> None:
    with pytest.raises(BackendRefused) as refused:
        read_url(url)
    assert "hush" not in str(refused.value)
    assert "more" not in str(refused.value)


def test_what_was_read_is_shown_without_passwords() -> None:
    target = read_url("redis+sentinel://u:hush@a,b:1/main?sentinel_password=hush")
    assert repr(target) == "RedisTarget(sentinel, a:26379,b:1)"


def test_a_password_may_have_any_character_percent_encoded() -> None:
    target = read_url("redis://me:%2F%40%23%3F%20%25%2C@host")
    assert (target.username, target.password) == ("me", "/@#? %,")


def test_sentinels_have_users_and_passwords_of_their_own() -> None:
    target = read_url(
        "redis+sentinel://u:p@a/main?sentinel_username=watcher&sentinel_password=a%2Fb"
    )
    assert (target.username, target.password) == ("u", "p")
    assert (target.sentinel_username, target.sentinel_password) == ("watcher", "a/b")


def test_certificates_are_options_of_the_url() -> None:
    target = read_url("rediss://host?ssl_ca_certs=/ca.pem&ssl_certfile=/c.pem&ssl_keyfile=/k.pem")
    assert target.tls == {
        "ssl_ca_certs": "/ca.pem",
        "ssl_certfile": "/c.pem",
        "ssl_keyfile": "/k.pem",
    }
    with pytest.raises(BackendRefused, match="ssl_ca_certs"):
        target.tls_context()


@pytest.mark.parametrize(
    "url",
    [
        "redis://host?ssl_ca_certs=/ca.pem",
        "redis://host?sentinel_password=x",
        "rediss://host?socket_timeout=1",
        "rediss://host?db=3",
    ],
)
def test_options_that_would_be_ignored_are_refused(url: str) -> None:
    with pytest.raises(BackendRefused, match="option"):
        read_url(url)


@pytest.mark.parametrize("namespace", ["", "a{b", "a}b", "a b", "a\n"])
def test_a_namespace_that_would_break_keys_is_refused(namespace: str) -> None:
    with pytest.raises(BackendRefused):
        checked_namespace(namespace)


def test_a_plain_namespace_is_fine() -> None:
    assert checked_namespace("team:prod-2") == "team:prod-2"
