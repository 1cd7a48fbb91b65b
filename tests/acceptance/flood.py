"""A process that asks for more than a server can give.

    python -m tests.acceptance.flood PORT TENANT WORKFLOW CONNECTIONS SECONDS

Every connection sends a start the moment the one before it was answered, and a connection that the
server refuses or closes is opened again. At the end it says, as a line of JSON, how often each
status came, how many refusals did not say when to come again, and which runs were admitted.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from typing import Final

import msgspec

__all__ = ["Said"]

_ANSWER_S_MAX: Final = 20.0
_REFUSALS: Final = (429, 503)
_BODY: Final = b'{"input": {}}'


class Said(msgspec.Struct):
    """What the process says at its end."""

    statuses: dict[int, int]
    without_retry_after: int
    silences: int
    """Requests that got no answer in time."""
    disconnects: int
    runs: list[str]


async def _send(said: Said, counted: Counter[int], port: int, request: bytes, until: float) -> None:
    while time.monotonic() < until:
        try:
            async with asyncio.timeout(_ANSWER_S_MAX):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            said.disconnects += 1
            await asyncio.sleep(0.1)
            continue
        try:
            while time.monotonic() < until:
                writer.write(request)
                async with asyncio.timeout(_ANSWER_S_MAX):
                    status, headers, body = await _answer(reader)
                counted[status] += 1
                if status in _REFUSALS and b"\r\nretry-after:" not in headers:
                    said.without_retry_after += 1
                if status == 200:
                    said.runs.append(msgspec.json.decode(body)["run_id"])
        except TimeoutError:
            said.silences += 1
        except (OSError, asyncio.IncompleteReadError):
            said.disconnects += 1
        finally:
            writer.close()


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0])
    return int(head[9:12]), head, await reader.readexactly(length)


async def main(port: int, tenant: str, workflow: str, connections: int, seconds: float) -> None:
    request = (
        f"POST /v1/workflows/{workflow}/runs HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"X-Stanchion-Tenant: {tenant}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(_BODY)}\r\n\r\n"
    ).encode() + _BODY
    said, counted = Said({}, 0, 0, 0, []), Counter[int]()
    until = time.monotonic() + seconds
    await asyncio.gather(*(_send(said, counted, port, request, until) for _ in range(connections)))
    said.statuses = dict(counted)
    sys.stdout.buffer.write(msgspec.json.encode(said) + b"\n")


if __name__ == "__main__":
    _port, _tenant, _workflow, _connections, _seconds = sys.argv[1:]
    asyncio.run(main(int(_port), _tenant, _workflow, int(_connections), float(_seconds)))
