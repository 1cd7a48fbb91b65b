"""Starting on NATS: what must be on the server is made, checked, or refused with the fix."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stanchion.drills.proxy import Loss, proxied
from stanchion.ports.errors import BackendRefused, BackendTimeout, BackendUnavailable
from tests.contract.buses import NatsStage, plain_client, staged
from tests.servers import NatsServer, running_nats


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with running_nats() as server:
        yield server


@pytest.fixture
def victim() -> Iterator[NatsServer]:
    with running_nats() as server:
        yield server


@pytest.fixture
async def stage(server: NatsServer) -> AsyncIterator[NatsStage]:
    async with staged(NatsStage(server.url)) as stage:
        yield stage


async def test_starting_without_a_server_fails_in_time(victim: NatsServer) -> None:
    victim.stop()
    began = time.monotonic()
    with pytest.raises(BackendUnavailable, match=victim.address):
        await NatsStage(victim.url, timeout_s=2.0).open()
    assert time.monotonic() - began < 5.0


async def test_starting_with_a_server_that_stands_still_fails_in_time(victim: NatsServer) -> None:
    victim.pause()
    began = time.monotonic()
    with pytest.raises(BackendTimeout):
        await NatsStage(victim.url, timeout_s=1.0).open()
    assert time.monotonic() - began < 5.0


@pytest.mark.parametrize(
    "url",
    [
        "nats://joe:hush/more@127.0.0.1:1",
        "nats://joe:more/hush@127.0.0.1:1",
        "nats://joe:more#hush@127.0.0.1:1",
        "nats://joe:more?hush@127.0.0.1:1",
        "nats://joe:hush,more@127.0.0.1:1",
        "nats://joe:hush more",
    ],
)
async def test_a_url_that_cannot_be_read_is_refused_and_not_quoted(url: str) -> None:
    with pytest.raises(BackendRefused, match="percent-encode") as refused:
        await NatsStage(url).open()
    assert "hush" not in str(refused.value)
    assert "more" not in str(refused.value)


@pytest.mark.parametrize("password", ["hush", "%2Fhush", "a%40hush", "@hush", "%20hush%23"])
async def test_no_part_of_the_password_is_in_an_error(password: str, victim: NatsServer) -> None:
    victim.stop()
    url = f"nats://joe:{password}@{victim.address}"
    with pytest.raises(BackendUnavailable, match=victim.address) as refused:
        await NatsStage(url, timeout_s=2.0).open()
    assert "hush" not in str(refused.value)
    assert "joe" not in str(refused.value)


async def test_a_password_is_not_told_to_a_server_that_does_not_speak_the_tls_it_was_asked_for(
    server: NatsServer,
) -> None:
    async with proxied(server.port) as proxy:
        trap = proxy.trap(b"sesame", Loss.CUT)
        with pytest.raises(BackendUnavailable, match="does not speak TLS"):
            await NatsStage(f"tls://joe:sesame@127.0.0.1:{proxy.port}", timeout_s=2.0).open()
        assert not trap.sprung.is_set()


async def test_of_several_addresses_one_that_answers_is_enough(
    stage: NatsStage, victim: NatsServer
) -> None:
    victim.stop()
    bus = await stage.open_at(f"{victim.url},{stage.url}")
    await bus.ping()


async def test_a_server_without_jetstream_is_named_with_the_fix() -> None:
    with (
        running_nats(has_jetstream=False) as server,
        pytest.raises(BackendUnavailable, match="-js"),
    ):
        await NatsStage(server.url, timeout_s=2.0).open()


async def test_a_wrong_password_is_refused_and_not_repeated() -> None:
    with running_nats("--user", "replica", "--pass", "right") as server:
        with pytest.raises(BackendRefused, match="does not let us in") as refused:
            await NatsStage(f"nats://replica:wrong@{server.address}").open()
        assert "wrong" not in str(refused.value)
        async with staged(NatsStage(f"nats://replica:right@{server.address}")) as stage:
            bus = await stage.open()
            await bus.ping()


async def test_an_account_that_may_too_little_is_refused_with_the_fix(tmp_path: Path) -> None:
    config = tmp_path / "nats.conf"
    config.write_text(
        f'jetstream {{ store_dir: "{tmp_path}" }}\n'
        'authorization { users: [{ user: u, password: p, permissions: { publish: "x.>" } }] }\n',
        encoding="utf-8",
    )
    with (
        running_nats("--config", str(config), has_jetstream=False) as server,
        pytest.raises(BackendRefused, match=r"how-to/nats\.md"),
    ):
        await NatsStage(f"nats://u:p@{server.address}", timeout_s=1.0).open()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("retention", "limits"),
        ("storage", "memory"),
        ("discard_new_per_subject", False),
        ("max_msgs_per_subject", 2),
        ("max_age", 60_000_000_000),
        ("max_msgs", 1_000),
    ],
)
async def test_a_stream_with_other_settings_is_refused_with_the_fix(
    stage: NatsStage, setting: str, value: object
) -> None:
    name = f"{stage.namespace}_advance".upper()
    config = {
        "name": name,
        "subjects": [f"{stage.namespace}.advance.>"],
        "retention": "workqueue",
        "storage": "file",
        "discard": "new",
        "discard_new_per_subject": True,
        "max_msgs_per_subject": 1,
        setting: value,
    }
    await _ask(stage, f"STREAM.CREATE.{name}", config)
    with pytest.raises(BackendRefused, match=setting) as refused:
        await stage.open()
    assert f"nats stream rm {name}" in str(refused.value)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_deliver", 3),
        ("max_ack_pending", 100),
        ("filter_subject", "{namespace}.advance.00.>"),
    ],
)
async def test_a_consumer_with_other_settings_is_refused_with_the_fix(
    stage: NatsStage, setting: str, value: object
) -> None:
    await (await stage.open()).close()
    name = f"{stage.namespace}_advance".upper()
    if isinstance(value, str):
        value = value.format(namespace=stage.namespace)
    config = {
        "durable_name": "replicas",
        "ack_policy": "explicit",
        "max_deliver": -1,
        "max_ack_pending": -1,
        setting: value,
    }
    await _ask(stage, f"CONSUMER.DELETE.{name}.replicas")
    await _ask(stage, f"CONSUMER.CREATE.{name}.replicas", {"stream_name": name, "config": config})
    with pytest.raises(BackendRefused, match=setting) as refused:
        await stage.open()
    assert f"nats consumer rm {name} replicas" in str(refused.value)


async def test_what_the_operator_may_choose_is_left_alone(stage: NatsStage) -> None:
    name = f"{stage.namespace}_advance".upper()
    await (await stage.open()).close()
    info = await _ask(stage, f"STREAM.INFO.{name}")
    chosen = {**info["config"], "description": "ours", "compression": "s2"}
    await _ask(stage, f"STREAM.UPDATE.{name}", chosen)
    await (await stage.open()).close()
    info = await _ask(stage, f"STREAM.INFO.{name}")
    assert info["config"]["compression"] == "s2"


@pytest.mark.parametrize("namespace", ["", "a.b", "a b", "a*", ">", "ä", "x" * 65])
async def test_a_namespace_that_nats_cannot_carry_is_refused(
    server: NatsServer, namespace: str
) -> None:
    stage = NatsStage(server.url)
    stage.namespace = namespace
    with pytest.raises(BackendRefused, match="namespace"):
        await stage.open()


async def _ask(stage: NatsStage, verb: str, config: object = None) -> dict[str, Any]:
    body = b"" if config is None else msgspec.json.encode(config)
    async with plain_client(stage.url) as client:
        answer = await client.request(f"$JS.API.{verb}", body, timeout=5)
    said = msgspec.json.decode(answer.data, type=dict[str, Any])
    assert "error" not in said, said
    return said
