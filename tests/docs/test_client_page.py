"""The page about the Python client has every method as it is called, and its examples run."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import stanchion
from tests.docs.terminal import ROOT, blocks_of, serving

PAGE = ROOT / "docs" / "reference" / "client.md"


def called(kind: type) -> list[str]:
    """Every public method with what it takes, as one writes it."""
    return sorted(
        f"{name}{_taken(method)}"
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    )


def _taken(method: object) -> str:
    assert callable(method)
    signature = inspect.signature(method)
    empty = inspect.Signature.empty
    parameters = [each.replace(annotation=empty) for each in signature.parameters.values()][1:]
    return str(signature.replace(parameters=parameters, return_annotation=empty))


@pytest.mark.parametrize("kind", [stanchion.Client, stanchion.AsyncClient])
def test_the_page_has_every_method_of_both_clients_as_it_is_called(kind: type) -> None:
    headings = re.findall(r"^### `(.+)`$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(headings) == called(kind)


def test_each_method_says_what_it_gives_and_has_an_example() -> None:
    text = PAGE.read_text(encoding="utf-8")
    sections = re.split(r"^##+ ", text, flags=re.MULTILINE)
    methods = [each for each in sections if each.startswith("`")]
    assert len(methods) == len(called(stanchion.Client))
    for section in methods:
        assert re.search(r"[Rr]eturns|Iterates", section), section
        assert re.search(r"[Rr]aises", section) or "workflows(" in section, section
        name = section[1:].partition("(")[0]
        assert re.search(rf"```python\n[^`]*\bclient\.{name}\(", section), section


@pytest.mark.parametrize("kind", [stanchion.RunHandle, stanchion.AsyncRunHandle])
def test_the_page_has_the_methods_of_a_handle(kind: type) -> None:
    _, _, last = PAGE.read_text(encoding="utf-8").partition("## A run that was started")
    named = re.search(r"without the run's id: (.*?)\.", last, re.DOTALL)
    assert named is not None
    methods = [each.partition("(")[0] for each in called(kind)]
    assert re.findall(r"`(\w+)`", named[1]) == methods


def test_the_examples_run_from_top_to_bottom(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, object] = {"__name__": "page"}
    examples = [block.text for block in blocks_of(PAGE) if block.kind == "python"]
    with serving(tmp_path) as url:
        for example in examples:
            exec(example.replace("http://127.0.0.1:8420", url), names)  # noqa: S102 - our own page
    said = capsys.readouterr().out
    assert said.startswith("order 1\n")
    assert "\nrun_cancelled\n" in said
    assert "{'ready': {'mail.send': 1}}" in said
    assert said.endswith("\nsucceeded\n")
