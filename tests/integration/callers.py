"""A process full of callers that all want a run at the same moment.

    python -m tests.integration.callers URL NAMESPACE TENANT CALLERS SEED [KEY]

It says ``"ready"``, waits for a line, and then says what each caller was answered.
"""

from __future__ import annotations

import asyncio
import random
import sys

import msgspec

from stanchion.adapters.store.redis import RedisStore
from stanchion.core.admission import Admitted, Replayed
from stanchion.core.model import TenantId
from tests.contract import builders

__all__: list[str] = []


async def main(url: str, namespace: str, tenant: str, callers: int, seed: int, key: str) -> None:
    # Every process draws ids of its own.
    builders._chance = random.Random(seed)  # noqa: SLF001 - builders' chance is the same everywhere
    store = await RedisStore.open(url, namespace=namespace, timeout_s=builders.WITHIN_MS / 1000)
    wanted = [
        builders.admission(await store.now(), tenant=TenantId(tenant), key=key or None)
        for _ in range(callers)
    ]
    _say("ready")
    await asyncio.to_thread(sys.stdin.readline)
    verdicts = await asyncio.gather(
        *(store.admit(each, within_ms=builders.WITHIN_MS) for each in wanted)
    )
    _say(
        [
            (type(each).__name__, each.run_id if isinstance(each, Admitted | Replayed) else None)
            for each in verdicts
        ]
    )
    await store.close()


def _say(words: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(words) + b"\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _url, _namespace, _tenant, _callers, _seed, *_key = sys.argv[1:]
    asyncio.run(main(_url, _namespace, _tenant, int(_callers), int(_seed), "".join(_key)))
