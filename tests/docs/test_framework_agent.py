"""An agent framework behind the worker: the same workflow, the same answer."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from pathlib import Path

import pytest

import stanchion
from tests.docs.terminal import PATIENCE_S, ROOT, Terminal, serving

EXAMPLES = ROOT / "examples"

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(
        find_spec("pydantic_ai") is None,
        reason="needs the packages of the dependency group 'examples'",
    ),
]


def test_a_framework_behind_the_worker_gives_the_same_report(tmp_path: Path) -> None:
    worker = "stanchion worker examples.framework_agent:app --url"
    with (
        serving(tmp_path) as url,
        Terminal(ROOT).background(f"{worker} {url}", tmp_path / "worker.log"),
        stanchion.Client(url) as client,
    ):
        for name in ("publish-report", "research"):
            text = (EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8")
            client.apply_workflow(text.replace("delay_s: 5", "delay_s: 0.1"))
        run = client.start("research", {"question": "What holds a rope?", "review": False})
        ended = run.wait(timeout_s=PATIENCE_S)
    assert (ended.status, ended.error) == ("succeeded", None)
    assert ended.output == {
        "report": "What holds a rope?\n"
        "- What holds a rope: materials: 9 sources\n"
        "- What holds a rope: history: 2 sources\n"
        "- What holds a rope: failures: 4 sources",
        "checked": True,
    }


def test_a_tool_does_not_act_for_a_job_that_was_lost() -> None:
    from examples.framework_agent import searcher  # noqa: PLC0415 - may not be importable

    class Gone:
        lost = stanchion.FenceCause.TAKEN

        def note(self, progress: object) -> None:
            raise AssertionError(progress)

        def use(self, usage: object) -> None:
            raise AssertionError(usage)

    job = stanchion.Job("agent.search", {"q": "rope"}, hold=Gone())
    with pytest.raises(stanchion.LeaseLost):
        asyncio.run(searcher.run("rope", deps=job))
