"""The whole API as its own document describes it, held to it by schemathesis."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.acceptance.stack import ADMIN_KEY, Kind, Stack, running_stack

BUDGET_S = 25
BUDGET_LONG_S = 600
CASES = 250
CASES_LONG = 20_000
_END_S_MAX = 60.0
"""It looks at its clock between two examples only."""
_ROOT: Final = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def described() -> Iterator[Stack]:
    with running_stack(Kind.SQLITE, admin_key=ADMIN_KEY) as stack:
        yield stack


async def test_the_api_is_what_its_document_says(described: Stack, tmp_path: Path) -> None:
    assert await _checked(described, tmp_path, "--max-time", str(BUDGET_S)) >= CASES


@pytest.mark.soak
async def test_the_api_is_what_its_document_says_in_many_cases(
    described: Stack, tmp_path: Path
) -> None:
    options = ("--max-examples", "1000", "--max-time", str(BUDGET_LONG_S))
    assert await _checked(described, tmp_path, *options) >= CASES_LONG


async def _checked(stack: Stack, directory: Path, *options: str) -> int:
    """How many cases there were; a single one that fails is shown."""
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).parent / "schemathesis"),
        *("--config-file", str(Path(__file__).with_name("schemathesis.toml"))),
        "run",
        f"{stack.urls[0]}/openapi.json",
        *("--checks", "all"),
        # A stopped bulk action can still be read, and a tenant without configuration has defaults.
        *("--exclude-checks", "use_after_free"),
        # A stream has no end.
        *("--exclude-path", "/v1/events"),
        *("--header", f"Authorization: Bearer {ADMIN_KEY}"),
        *("--request-timeout", "10"),
        *("--seed", "7"),
        *("--generation-database", "none"),
        "--no-color",
        *options,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={
            **os.environ,
            "PYTHONPATH": str(_ROOT),
            "SCHEMATHESIS_HOOKS": "tests.acceptance.schema_hooks",
        },
        # It leaves files behind where it runs.
        cwd=directory,
    )
    assert process.stdout is not None
    try:
        text = (await process.stdout.read()).decode(errors="replace")
        code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    # Its own errors come first; without a heading of either kind, the end says what happened.
    began = re.search(r"= (ERRORS|FAILURES) =", text)
    assert code == 0, text[began.start() if began else -20_000 :][:20_000]
    found = re.search(r"(\d+) generated", text)
    assert found is not None, text[-2_000:]
    return int(found[1])
