"""Starting: what a server refuses to begin with, and what it remembers from before."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance.caller import calling
from tests.acceptance.stack import Kind, running_stack
from tests.acceptance.waiting import until
from tests.acceptance.workflows import HOLD

_ROOT = Path(__file__).parents[2]
_END_S_MAX = 30.0


async def _refused(*flags: str, **variables: str) -> str:
    """What a server says that does not start."""
    clean = {name: value for name, value in os.environ.items() if "STANCHION" not in name}

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "stanchion", "serve", *flags],
            capture_output=True,
            text=True,
            timeout=_END_S_MAX,
            check=False,
            env={**clean, **variables},
            cwd=_ROOT,
        )

    ended = await asyncio.to_thread(run)
    assert ended.returncode != 0
    assert "Traceback" not in ended.stderr
    return ended.stdout + ended.stderr


async def test_a_foreign_host_without_keys_is_refused(tmp_path: Path) -> None:
    # An address of nobody's, so that nothing listens even if this should fail.
    said = await _refused("--host", "192.0.2.1", "--data-dir", str(tmp_path))
    assert "STANCHION_ADMIN_KEY" in said


async def test_a_redis_store_without_nats_is_refused_with_the_fix(tmp_path: Path) -> None:
    said = await _refused("--store", "redis://127.0.0.1:1", "--data-dir", str(tmp_path))
    assert "--bus" in said
    assert "nats://" in said


@pytest.mark.parametrize(
    ("flags", "variables", "expected"),
    [
        (("--store", "mysql://x"), {}, "--store"),
        ((), {"STANCHION_STROE": "memory:"}, "STANCHION_STROE"),
        ((), {"STANCHION_JOB_LEASE_TTL_S": "soon"}, "STANCHION_JOB_LEASE_TTL_S"),
        (("--port", "70000"), {}, "port"),
    ],
)
async def test_a_configuration_that_cannot_be_is_refused_by_name(
    tmp_path: Path, flags: tuple[str, ...], variables: dict[str, str], expected: str
) -> None:
    said = await _refused(*flags, "--data-dir", str(tmp_path), **variables)
    assert expected in said


async def test_a_file_is_for_one_process_and_survives_it() -> None:
    with running_stack(Kind.SQLITE, idempotency_ttl_s=1.0) as stack:
        replica = stack.replicas[0]
        async with calling(stack.urls) as caller:
            await caller.apply("hold", HOLD)
            await caller.configure(max_concurrent_runs=2)
            kept = await caller.start("hold", key="kept")
            directory = replica.log.parent / "data"
            said = await _refused("--port", "0", "--data-dir", str(directory))
            assert "stanchion.db" in said or "process" in said

            replica.kill()
            await asyncio.to_thread(replica.start)
            assert (await caller.run(kept.run_id))["status"] == "waiting"
            again = await caller.start("hold", key="kept")
            assert (again.run_id, again.is_replayed) == (kept.run_id, True)
            assert (await caller.start("hold")).status == 200
            assert (await caller.start("hold")).status == 429, "caps and slots are remembered"

            # A key is kept while its run is unfinished, and for its time after that.
            await caller.cancel(kept.run_id)
            assert (await caller.start("hold", key="kept")).is_replayed

            async def is_forgotten() -> bool:
                return not (await caller.start("hold", key="kept")).is_replayed

            await until(is_forgotten, within_s=5.0)


def test_an_idle_server_sends_redis_at_most_twenty_scripts_a_second() -> None:
    watched_s = 3

    def scripts() -> int:
        return int(client.info("commandstats")["cmdstat_evalsha"]["calls"])

    with running_stack(Kind.REDIS) as stack, stack.valkey.client() as client:
        client.blpop(["nothing"], timeout=1)  # Until what a start takes is over.
        before = scripts()
        client.blpop(["nothing"], timeout=watched_s)
        assert 0 < scripts() - before <= 20 * watched_s
