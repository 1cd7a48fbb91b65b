"""Every example, as a newcomer runs it: on its own, or against a real server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

import stanchion
from tests.docs.terminal import PATIENCE_S, ROOT, Terminal, serving

EXAMPLES = ROOT / "examples"
RUN_HERE = {"agents.py", "caller.py", "core_walkthrough.py", "demo.py", "fenced_write.py"}
RUN_ELSEWHERE = {"framework_agent.py"}
"""In test_framework_agent.py: it needs a package that a contributor need not have."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("server")) as url:
        yield url


def run(example: str, *arguments: str) -> str:
    """What an example prints. It says nothing on standard error and ends well."""
    ran = subprocess.run(
        [sys.executable, f"examples/{example}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout
    return ran.stdout


def test_every_example_is_run_by_a_test() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == RUN_HERE | RUN_ELSEWHERE


def test_the_walkthrough_drives_the_core_to_a_result() -> None:
    printed = run("core_walkthrough.py")
    assert "run demo: succeeded" in printed
    assert 'output: {"report":"8 hits in 2 searches","checked":true}' in printed


def test_a_write_with_an_old_fence_is_refused() -> None:
    assert "refused" in run("fenced_write.py")


def test_the_demo_admits_two_of_ten_and_finishes_what_it_admitted() -> None:
    printed = run("demo.py")
    assert "together: 2 × 200, 8 × 429" in printed
    assert printed.count("  429  max concurrent runs reached; retry in ") == 8
    assert "approved by a person, succeeded" in printed
    assert "Both slots are free again: the next start is answered 200." in printed
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"]
)
def test_a_demo_that_is_stopped_stops_its_server_and_removes_its_files(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with subprocess.Popen(
        [sys.executable, "-u", "examples/demo.py"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as demo:
        assert demo.stdout is not None
        said = next(line for line in demo.stdout if line.startswith("A server on SQLite at "))
        url = said.split()[5].rstrip(",")
        demo.send_signal(number)
        _, errors = demo.communicate(timeout=60)
    assert (demo.returncode, errors) == (code, "")
    with pytest.raises(URLError):
        urlopen(f"{url}/livez", timeout=5).close()  # noqa: S310 - of 127.0.0.1
    assert list(scratch.iterdir()) == []


def test_the_demo_uses_neither_the_settings_nor_the_store_of_its_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "mine.db"
    monkeypatch.setenv("STANCHION_STORE", f"sqlite:{store}")
    monkeypatch.setenv("STANCHION_LOG_FORMAT", "text")
    monkeypatch.setenv("STANCHION_URL", "http://127.0.0.1:9")
    (tmp_path / "stanchion.toml").write_text("port = 'none'\n", encoding="utf-8")
    monkeypatch.setenv("STANCHION_CONFIG", str(tmp_path / "stanchion.toml"))
    assert "approved by a person, succeeded" in run("demo.py")
    assert not store.exists()


def test_a_caller_gets_all_its_orders_through_a_tenant_that_is_full(url: str) -> None:
    assert "orders: 10 succeeded" in run("caller.py", url)


def test_the_research_agent_plans_searches_asks_and_writes(url: str, tmp_path: Path) -> None:
    shell = Terminal(ROOT)
    worker = f"stanchion worker examples.agents:app --url {url}"
    with (
        shell.background(worker, tmp_path / "worker.log"),
        stanchion.Client(url, tenant="agents") as client,
    ):
        for name in ("publish-report", "research"):
            text = (EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8")
            client.apply_workflow(text.replace("delay_s: 5", "delay_s: 0.1"))
        started = client.start("research", {"question": "What holds a rope?", "review": True})
        until_asked(client, started.run_id)
        client.approve(started.run_id, "review")
        ended = started.wait(timeout_s=PATIENCE_S)
    assert ended.status == "succeeded"
    assert ended.output == {
        "report": "What holds a rope?\n"
        "- What holds a rope: materials: 9 sources\n"
        "- What holds a rope: history: 2 sources\n"
        "- What holds a rope: failures: 4 sources",
        "checked": True,
    }


def until_asked(client: stanchion.Client, run_id: str) -> None:
    ends = time.monotonic() + PATIENCE_S
    while client.get(run_id).steps["review"].status != "waiting":
        assert time.monotonic() < ends, "nobody was asked"
        time.sleep(0.05)
