"""The caller of the examples, against a server that has no room, then none at all, then some."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from tests.client.scripted import away, full, run_view
from tests.transport.tiny_server import Heard, Reaction, answer, tiny_server

EXAMPLE = Path(__file__).parents[2] / "examples" / "caller.py"


class Shop:
    """A tenant with two slots; every third start is answered 503."""

    def __init__(self) -> None:
        self.runs: dict[str, bytes] = {}
        self._active = 0
        self._starts = 0

    def react(self, heard: Heard) -> Reaction:
        if heard.method == "PUT":
            return answer(b'{"id": "ship-order", "version": 1}')
        if heard.method == "GET":
            self._active -= 1
            return answer(run_view().body)
        self._starts += 1
        if self._starts % 3 == 0:
            return answer(away(1).body, 503)
        if self._active >= 2:
            return answer(full(1).body, 429)
        self._active += 1
        key = heard.headers["idempotency-key"]
        assert key not in self.runs
        self.runs[key] = heard.body
        return answer(msgspec.json.encode({"run_id": key, "status": "running"}))


def run_example(url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, EXAMPLE, url], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_caller_ships_every_order_once() -> None:
    shop = Shop()
    with tiny_server(shop.react) as server:
        ran = run_example(server.url)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "orders: 10 succeeded" in ran.stdout
    assert "retries of class unavailable" in ran.stdout
    assert len(shop.runs) == 10


def test_the_caller_stops_when_the_server_is_unavailable() -> None:
    with tiny_server(lambda _heard: answer(away(40_000).body, 503)) as server:
        ran = run_example(server.url)
    assert ran.returncode == 1
    assert "the server is unavailable: apply_workflow: no (503 gate_unavailable)" in ran.stdout
