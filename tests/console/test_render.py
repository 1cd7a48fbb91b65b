"""How values of any size are shown: a large one is cut, and only what is shown is made."""

from __future__ import annotations

import asyncio
import re

import msgspec
import pytest
from jinja2 import Environment, Template
from markupsafe import escape

from stanchion.console.render import Assets, Templates, json_text
from stanchion.core.json_value import JsonValue

DEEP: JsonValue = [[[{"a": [number, {}, []], "b": "text"}] * 3] for number in range(30)]
VALUES: dict[str, JsonValue] = {
    "null": None,
    "small": {"a": [1, 2.5, None], "b": {}, "c": [], "<i>": "<b>"},
    "deep": DEEP,
    "a long list": [1] * 300_000,
    "rows": [{"a": number, "b": "text"} for number in range(50_000)],
    "a long text": "a\n" * 200_000,
    "texts": ["x" * 50_000] * 9,
    "many members": {f"m{number}": number for number in range(60_000)},
    "deep lists": [DEEP] * 100,
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("chars_max", [400, 4_000, 65_536])
def test_a_value_is_shown_from_its_beginning(value: JsonValue, chars_max: int) -> None:
    whole = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    shown, _, note = json_text(value, chars_max).partition('<i class="cut">')
    assert shown == escape(whole[:chars_max])
    more = len(whole) - chars_max
    found = re.search(r"… (more than )?([\d,]+) more characters", note)
    if more <= 0:
        assert not note
    else:
        assert found is not None
        count = int(found[2].replace(",", ""))
        assert count < more if found[1] else count == more


def test_of_a_large_value_only_the_beginning_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    # The page of a run with 7 MB of outputs stopped the event loop for 130 ms.
    lengths = list[int]()
    form = msgspec.json.format

    def formatted(text: bytes, *, indent: int) -> bytes:
        lengths.append(len(text))
        return form(text, indent=indent)

    monkeypatch.setattr(msgspec.json, "format", formatted)
    for value in VALUES.values():
        json_text(value)
    assert max(lengths) < 300_000


async def test_a_template_is_compiled_once_for_all_that_need_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = list[str]()
    get_template = Environment.get_template

    def counted(self: Environment, name: str) -> Template:
        compiled.append(name)
        return get_template(self, name)

    monkeypatch.setattr(Environment, "get_template", counted)
    templates = Templates(Assets())
    names = ["problem.html", "login.html"] * 10
    found = await asyncio.gather(*map(templates.get, names))
    assert [each.name for each in found] == names
    assert max(map(compiled.count, names)) == 1
