"""Canaries: a fresh run of two steps through one replica says whether, and when, it works again."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Final

import httpx2

from tests.acceptance.caller import Answer, Caller

__all__ = ["GIVE_UP_S", "sing"]

GIVE_UP_S: Final = 60.0
"""Past every bound: what takes longer is not measured any more."""
_OK: Final = 200
_ASK_S_MAX: Final = 3.0
_WAIT_S: Final = 1.0
_PAUSE_S: Final = 0.1


async def sing(caller: Caller, replica: int, *, since: float) -> float:
    """Start a run through this replica and wait for its end there.

    Says how many seconds after ``since`` (a time of day) that was.
    """
    here = caller.at(replica)
    key = secrets.token_hex(8)
    run_id = ""
    while time.time() - since < GIVE_UP_S:
        if not run_id:
            answer = await _ask(here, "POST", "/v1/workflows/canary/runs", key)
            run_id = answer.run_id if answer is not None and answer.status == _OK else ""
        if run_id:
            answer = await _ask(here, "GET", f"/v1/runs/{run_id}?wait={_WAIT_S:g}", None)
            if answer is not None and answer.status == _OK and answer.body["finished_at"]:
                assert answer.body["status"] == "succeeded", answer.text
                return time.time() - since
            if answer is not None and answer.status == 404:
                # It went with what a failover lost: once more.
                run_id = ""
        await asyncio.sleep(_PAUSE_S)
    return GIVE_UP_S


async def _ask(caller: Caller, method: str, path: str, key: str | None) -> Answer | None:
    body: object = None if key is None else {"input": {}}
    headers = {} if key is None else {"Idempotency-Key": key}
    try:
        return await caller.call(method, path, body, headers=headers, timeout_s=_ASK_S_MAX)
    except httpx2.TransportError:
        return None
