"""The bus on a cluster of NATS servers: it goes on when one of three dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from stanchion.ports.bus import Bus
from stanchion.ports.errors import BackendError
from stanchion.ports.records import OutboxRow
from tests.chaos.nats_cluster import NatsCluster, running_nats_cluster
from tests.contract.buses import LONG_S, Desk, NatsStage, consuming, row, staged

STREAM = {
    "retention": "workqueue",
    "storage": "file",
    "discard": "new",
    "discard_new_per_subject": True,
    "max_msgs_per_subject": 1,
}


@pytest.fixture
async def cluster() -> AsyncIterator[NatsCluster]:
    async with running_nats_cluster() as cluster:
        yield cluster


async def test_the_bus_goes_on_when_the_server_that_leads_it_dies(cluster: NatsCluster) -> None:
    async with staged(NatsStage(cluster.url)) as stage:
        bus, stream, desk = await stage.open(), _stream(stage), Desk()
        info = await cluster.ask(f"STREAM.INFO.{stream}")
        assert info["config"]["num_replicas"] == 3
        before, after = row(), row()
        await bus.publish([before])
        leader = await cluster.leader_of(stream)
        await asyncio.to_thread(cluster.nodes[leader].kill)
        await _published(bus, after)
        async with consuming(bus, desk.handle):
            assert {await desk.next(), await desk.next()} == {before, after}


async def test_a_stream_that_is_there_keeps_its_one_server_and_the_log_says_so(
    cluster: NatsCluster, caplog: pytest.LogCaptureFixture
) -> None:
    async with staged(NatsStage(cluster.url)) as stage:
        stream = _stream(stage)
        chosen = {"name": stream, "subjects": [f"{stage.namespace}.advance.>"], **STREAM}
        await cluster.ask(f"STREAM.CREATE.{stream}", {**chosen, "num_replicas": 1})
        with caplog.at_level(logging.WARNING, logger="stanchion"):
            await stage.open()
        assert [line.message for line in caplog.records] == ["bus_fragile"]
        info = await cluster.ask(f"STREAM.INFO.{stream}")
        assert info["config"]["num_replicas"] == 1


async def _published(bus: Bus, call: OutboxRow) -> None:
    """As soon as another server leads: bad news is allowed until then."""
    async with asyncio.timeout(LONG_S):
        while True:
            try:
                await bus.publish([call])
            except BackendError:
                await asyncio.sleep(0.05)
            else:
                return


def _stream(stage: NatsStage) -> str:
    return f"{stage.namespace}_advance".upper()
