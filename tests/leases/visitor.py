"""A process that wants leases, for tests.

python -m tests.leases.visitor URL NAMESPACE add NAME FILE TURNS    adds one to a number, so often
python -m tests.leases.visitor URL NAMESPACE enter NAME FILE        waits, and writes a line
python -m tests.leases.visitor URL NAMESPACE stay NAME              waits, says so, and stays

What it prints is one line for every lease: its fence.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from pathlib import Path

import stanchion

_WAIT_S = 50.0
_TTL_S = 24.0
"""A call may take a twelfth of it: two seconds, for machines with much else to do."""
TTL_S = 2.4
"""The term of whoever stays, so that nobody waits long for the lease of a dead one."""


def say(fence: int | None) -> None:
    print(fence, flush=True)  # noqa: T201 - this process speaks by printing


def read(file: str) -> int:
    return int(Path(file).read_text())


def write(file: str, number: int) -> None:
    Path(file).write_text(str(number))


def append(file: str, fence: int | None) -> None:
    with Path(file).open("a") as lines:
        lines.write(f"{fence}\n")


async def main(url: str, namespace: str, command: str, name: str, *rest: str) -> None:
    ttl_s = TTL_S if command == "stay" else _TTL_S
    async with stanchion.Leases(url, namespace=namespace, ttl_s=ttl_s) as leases:
        match command, rest:
            case "add", (number, turns):
                for _ in range(int(turns)):
                    async with leases.hold(name, wait_s=_WAIT_S) as lease:
                        total = read(number)
                        await asyncio.sleep(0.001)
                        write(number, total + 1)
                        say(lease.fence)
            case "enter", (file,):
                async with leases.hold(name, wait_s=_WAIT_S) as lease:
                    append(file, lease.fence)
                    say(lease.fence)
            case "stay", ():
                # Its calls have 200 ms. If that was not enough, it asks again.
                while True:
                    with contextlib.suppress(stanchion.LeaseUnavailable):
                        async with leases.hold(name, wait_s=_WAIT_S) as lease:
                            say(lease.fence)
                            await asyncio.sleep(_WAIT_S)
                            return
            case _:
                raise SystemExit(__doc__)


if __name__ == "__main__":
    logging.disable()
    asyncio.run(main(*sys.argv[1:]))
