"""Programs of ours that run as processes of their own, and speak in lines of JSON.

A program is started with ``python -m``, its standard input and output are pipes, and it is ended by
its process id when the block ends, whatever happened. Every wait has an end.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

__all__ = ["Program", "running_program"]

_ROOT: Final = Path(__file__).parents[2]
_LINE_BYTES_MAX: Final = 1024 * 1024
_LINE_S_MAX: Final = 30.0
"""A process starts slowly on a machine that is busy."""
_END_S_MAX: Final = 5.0


class Program:
    """A process that says a line of JSON at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    def tell(self, line: str) -> None:
        """Send it a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())

    async def line(self, within_s: float = _LINE_S_MAX) -> Any:  # noqa: ANN401 - what it means is known to who started it
        """The next thing it says; ``None`` at its end. A line that was cut off is not one."""
        assert self.process.stdout is not None
        async with asyncio.timeout(within_s):
            text = await self.process.stdout.readline()
        return msgspec.json.decode(text) if text.endswith(b"\n") else None

    async def kill(self) -> None:
        """End it without a chance to write anything down."""
        with suppress(ProcessLookupError):
            self.process.kill()
        async with asyncio.timeout(_END_S_MAX):
            await self.process.wait()


@asynccontextmanager
async def running_program(module: str, *arguments: str) -> AsyncIterator[Program]:
    """Start a program of ours; it is gone when the block ends."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", module),
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=_ROOT,
        limit=_LINE_BYTES_MAX,
    )
    program = Program(process)
    try:
        yield program
    finally:
        await program.kill()
