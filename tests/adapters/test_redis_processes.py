"""Several processes at once: however many starts race, the cap holds."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Final

from stanchion.adapters.store.redis import RedisStore
from stanchion.core.model import Instant
from stanchion.ports.records import Tenant
from tests.contract.builders import ACME, WITHIN_MS, admission
from tests.servers import running_server

_ROOT: Final = Path(__file__).parents[2]
_PROCESSES: Final = 4
_CALLERS: Final = 250
_WAIT_S_MAX: Final = 60.0


async def test_a_thousand_starts_from_four_processes_at_cap_two_admit_two() -> None:
    with running_server() as server:
        store = await RedisStore.open(server.url, timeout_s=30.0)
        await store.put_tenant(ACME, Tenant(max_concurrent_runs=2))
        said = await asyncio.to_thread(_race, server.url, "")
        assert said == {"Admitted": 2, "Full": _PROCESSES * _CALLERS - 2}
        assert await store.active_runs(ACME) == 2
        assert len((await store.list_runs(ACME)).items) == 2
        await store.close()


async def test_one_key_from_four_processes_makes_one_run() -> None:
    with running_server() as server:
        store = await RedisStore.open(server.url, timeout_s=30.0)
        said = await asyncio.to_thread(_race, server.url, "the-key")
        assert said == {"Admitted": 1, "Replayed": _PROCESSES * _CALLERS - 1}
        assert await store.active_runs(ACME) == 1
        await store.close()


def _race(url: str, key: str) -> Counter[str]:
    """Start all processes, let them go at once, and count their verdicts."""
    command = [sys.executable, "-m", "tests.adapters.test_redis_processes", url, key]
    racers = [
        subprocess.Popen(
            [*command, str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_ROOT
        )
        for number in range(_PROCESSES)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == b"ready\n"
    said: Counter[str] = Counter()
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write(b"go\n")
        racer.stdin.flush()
    for racer in racers:
        out, _ = racer.communicate(timeout=_WAIT_S_MAX)
        said.update(out.decode().split())
        assert racer.returncode == 0
    return said


async def _start_all(url: str, key: str, number: str) -> None:
    store = await RedisStore.open(url, timeout_s=30.0)
    # The builders' chance is the same everywhere: a time of its own gives each process other ids.
    now = Instant(await store.now() + int(number) * 60_000)
    wanted = [admission(now, key=key or None) for _ in range(_CALLERS)]
    print("ready", flush=True)  # noqa: T201 - this process speaks by printing
    sys.stdin.readline()
    verdicts = await asyncio.gather(*(store.admit(each, within_ms=WITHIN_MS) for each in wanted))
    print(*(type(verdict).__name__ for verdict in verdicts))  # noqa: T201 - likewise
    await store.close()


if __name__ == "__main__":
    asyncio.run(_start_all(*sys.argv[1:]))
