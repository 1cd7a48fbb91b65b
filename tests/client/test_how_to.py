"""What the page about 429 and 503 shows, runs; its figures are those of the tests."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from stanchion.core.retry import BUDGETS, RETRIES, RetryClass
from tests.client.scripted import PLENTY, away, full, run_view
from tests.client.test_storms import JITTERED_FOR_ALL, ONE_FOR_ALL, storm
from tests.transport.tiny_server import Heard, Reaction, answer, tiny_server

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "handle-429-and-503.md"


def blocks() -> list[tuple[str, str]]:
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def react(heard: Heard) -> Reaction:
    if heard.method == "GET":
        return answer(run_view().body)
    order = msgspec.json.decode(heard.body)["input"]["order"]
    if order == "43":
        return answer(full(31_000).body, 429)
    if order == "44" and heard.number == 4:
        return answer(away(1).body, 503)
    return answer(msgspec.json.encode({"run_id": "r1", "status": "running"}))


async def test_the_snippets_run_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"__name__": "snippets"}
    with tiny_server(react) as server:
        for language, snippet in blocks():
            if language != "python":
                continue
            code = compile(
                snippet.replace("http://127.0.0.1:8420", server.url),
                "snippet",
                "exec",
                flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
            )
            done = eval(code, names)  # noqa: S307 - our own page
            if inspect.isawaitable(done):
                await done
    assert capsys.readouterr().out.splitlines() == [
        "succeeded",
        "2 of 2 are running, try in 31.0 s",
        "{'unavailable': 1}",
        "running",
        "succeeded",
    ]


def test_the_only_command_is_the_example_that_is_tested() -> None:
    assert [text for language, text in blocks() if language != "python"] == [
        "python examples/caller.py http://127.0.0.1:8420\n"
    ]


def test_the_table_of_policies_is_the_policies() -> None:
    page = PAGE.read_text(encoding="utf-8")
    quota, unavailable = RETRIES[RetryClass.QUOTA], RETRIES[RetryClass.UNAVAILABLE]
    assert f"| {quota.attempts_max} | {unavailable.attempts_max} |" in page
    seconds = [policy.total_ms_max // 1000 for policy in (quota, unavailable)]
    assert f"| {seconds[0]} s | {seconds[1]} s |" in page
    budgets = [BUDGETS[RetryClass.QUOTA], BUDGETS[RetryClass.UNAVAILABLE]]
    said = [f"{each.tokens_max}, {each.refill_per_s:.0f}" for each in budgets]
    assert f"| {said[0]} | {said[1]} |" in page
    assert quota.retry_after_ms_max == unavailable.retry_after_ms_max == 30_000


def test_the_figures_of_the_storm_are_those_of_the_tests() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for policies, budgets in (
        (dict.fromkeys(RetryClass, ONE_FOR_ALL), PLENTY),
        (dict.fromkeys(RetryClass, JITTERED_FOR_ALL), PLENTY),
        (dict.fromkeys(RetryClass, replace(JITTERED_FOR_ALL, spread=0.25)), PLENTY),
        (RETRIES, PLENTY),
        (RETRIES, BUDGETS),
    ):
        server = storm(policies, budgets, 0)
        assert f"| {server.peak} | {len(server.retries_at_ms)} |" in page
