"""What the page about workers shows, runs."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest

from stanchion import Worker
from stanchion.core.lease import JOB_TERMS
from stanchion.core.limits import RESULT_BYTES_MAX
from stanchion.worker import events
from stanchion.worker.command import load_worker
from stanchion.worker.worker import DEFAULT_URL
from tests.worker.ledger import Ledger, serving
from tests.worker.test_processes import _now_ms, _working

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "write-a-worker.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_every_block_is_of_a_kind_that_is_run_here() -> None:
    assert {language for language, _ in BLOCKS} == {"python", "sh"}


async def test_the_snippets_run_and_their_worker_works(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("snippets")
    monkeypatch.setitem(sys.modules, "snippets", module)
    names = module.__dict__
    for language, snippet in BLOCKS:
        if language == "python":
            code = compile(snippet, "snippet", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            done = eval(code, names)  # noqa: S307 - our own page
            if inspect.isawaitable(done):
                await done
    app = names["app"]
    assert isinstance(app, Worker)
    ledger = Ledger(_now_ms)
    ledger.put("1", "agent.plan", {"question": "why"})
    ledger.put("2", "agent.search", {"q": "fences"})
    ledger.put("3", "agent.write", "nothing")
    ledger.put("4", "agent.write", {"busy": True})
    ledger.put("5", "agent.publish")
    ledger.put("6", "agent.index")
    async with serving(ledger) as url, _working(app, url):
        await ledger.all_done()
    assert ledger.results["1"].output == {"queries": ["why (1)", "why (2)"]}
    assert ledger.results["2"].output == "results for fences"
    assert [ledger.results[each].status for each in "3456"] == [
        "failed",
        "failed",
        "succeeded",
        "succeeded",
    ]


def test_the_command_names_what_the_first_snippet_defines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [command] = [text for language, text in BLOCKS if language == "sh"]
    stanchion, worker, module, flag, url = shlex.split(command)
    assert (stanchion, worker, flag, url) == ("stanchion", "worker", "--url", DEFAULT_URL)
    first = BLOCKS[0][1]
    assert first.startswith(f"# {module.split(':')[0]}.py\n")
    (tmp_path / "research_worker.py").write_text(first)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert load_worker(module).topics == ("agent.plan", "agent.search")


def test_the_page_names_every_event_and_the_figures_in_force() -> None:
    for kind in events.__all__:
        if inspect.isclass(getattr(events, kind)):
            assert f"`{kind}`" in TEXT
    assert f"{RESULT_BYTES_MAX // 1024} KiB" in TEXT
    assert JOB_TERMS.ttl_ms == 60_000
    assert JOB_TERMS.renew_every_ms == 20_000
