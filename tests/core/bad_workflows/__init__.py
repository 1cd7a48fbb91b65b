"""Workflow files that are bad, each with exactly what must be said about it.

Those that can be read by people are in the tables beside this file. Here are the others: bytes that
do not show, and texts too long to write down.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from stanchion.core.faults import FAULTS_MAX, Fault
from stanchion.core.workflow_file.source import Format

__all__ = ["BAD", "Bad"]


class Bad(NamedTuple):
    """A bad file."""

    name: str
    text: bytes | str
    faults: tuple[Fault, ...]
    notation: Format = "yaml"
    structural: bool = False
    """Whether its shape is at fault, so that the published schema must refuse it too."""


def _tables() -> list[Bad]:
    return [
        _case(case)
        for table in sorted(Path(__file__).parent.glob("*.yaml"))
        for case in yaml.safe_load(table.read_text(encoding="utf-8"))
    ]


def _case(case: dict[str, Any]) -> Bad:
    notation: Format = "yaml" if "yaml" in case else "json"
    faults = tuple(Fault(path, message, line) for line, path, message in case["faults"])
    return Bad(case["name"], case[notation], faults, notation, case.get("structural", False))


_TOP: Final = "id: w\nsteps:\n"


def _text_fault(message: str, line: int | None) -> tuple[Fault]:
    return (Fault("", message, line),)


_LONG: Final = [
    Bad("empty", "", _text_fault("the file is empty", None)),
    Bad(
        "a byte order mark",
        "\ufeffid: w\n",
        _text_fault("begins with a byte order mark; save it as UTF-8 without one", 1),
    ),
    Bad(
        "not UTF-8",
        b"id: w\nsteps: \xff\n",
        _text_fault("not UTF-8: byte 0xff at offset 13", 2),
    ),
    Bad(
        "UTF-16",
        "id: w".encode("utf-16-le") + b"\xd8",
        _text_fault("not UTF-8: byte 0xd8 at offset 10", 1),
    ),
    Bad(
        "UTF-16 that could be UTF-8",
        "id: w".encode("utf-16-be"),
        _text_fault("contains the character U+0000, which YAML does not allow", 1),
    ),
    Bad(
        "a NUL",
        "id: w\nsteps:\n  a: {topic: x\x00}\n",
        _text_fault("contains the character U+0000, which YAML does not allow", 3),
    ),
    Bad(
        "a control character",
        "id: \x07w\n",
        _text_fault("contains the character U+0007, which YAML does not allow", 1),
    ),
    Bad(
        "a tab for indentation",
        "id: w\nsteps:\n\ta: {topic: x}\n",
        _text_fault("a tab where YAML allows only spaces", 3),
    ),
    Bad(
        "a NUL in JSON",
        '{"id": \x00}',
        _text_fault('not JSON: column 8: expected a value, found "\\u0000}"', 1),
        "json",
    ),
    Bad(
        "nested too deep",
        f"id: w\nsteps: {'[' * 64}{']' * 64}\n",
        (Fault(f"steps{'[0]' * 63}", "nested deeper than 64 levels", 2),),
    ),
    Bad(
        "nested too deep in JSON",
        f'{{"id": "w",\n"output": {"[" * 64}{"]" * 64}}}',
        (Fault(f"output{'[0]' * 63}", "nested deeper than 64 levels", 2),),
        "json",
    ),
    Bad(
        "too many values",
        f'{{"id": "w", "output": [{"1," * 20_000}1]}}',
        _text_fault("more than 20000 keys and values", 1),
        "json",
    ),
    Bad(
        "too large",
        "id: w\n#" + "x" * 262_144,
        _text_fault("262151 bytes long; at most 262144 are allowed", None),
    ),
    Bad(
        "too many steps",
        _TOP + "".join(f"  s{number}: {{topic: x}}\n" for number in range(201)),
        (Fault("steps", "has 201 steps; from 1 to 200 are allowed", 2),),
        structural=True,
    ),
    Bad(
        "a long approval message",
        f"{_TOP}  a: {{approval: {{message: {'x' * 2_001}}}}}\n",
        (Fault("steps.a.approval.message", "2001 characters long; from 1 to 2000 are allowed", 3),),
        structural=True,
    ),
    Bad(
        "a long condition",
        f"{_TOP}  a: {{topic: x, when: \"input.x == '{'x' * 2_000}'\"}}\n",
        (Fault("steps.a.when", "2013 characters long; from 1 to 2000 are allowed", 3),),
        structural=True,
    ),
    Bad(
        "a long expression in a template",
        f"{_TOP}  a: {{topic: x, input: \"${{input.x == '{'x' * 2_000}'}}\"}}\n",
        (
            Fault(
                "steps.a.input",
                f'in "${{input.x == \'{"x" * 65}…": no closing brace within 2000 characters',
                3,
            ),
        ),
    ),
    Bad(
        "an input schema that doubles",
        'id: w\ninput_schema:\n  $ref: "#/$defs/d0"\n  $defs:\n    d30: {}\n'
        + "".join(
            f'    d{n}: {{allOf: [{{$ref: "#/$defs/d{n + 1}"}}, {{$ref: "#/$defs/d{n + 1}"}}]}}\n'
            for n in range(30)
        )
        + "steps: {a: {topic: x}}\n",
        (Fault("input_schema", "more than 500 subschemas, once every $ref is followed", 2),),
    ),
    Bad(
        "a large input schema",
        f"id: w\ninput_schema: {{title: {'x' * 65_536}}}\nsteps: {{a: {{topic: x}}}}\n",
        (Fault("input_schema", "65548 bytes long; at most 65536 are allowed", 2),),
    ),
    Bad(
        "more faults than anyone reads",
        _TOP + "".join(f"  s{n}: {{topic: x, needs: [none{n}]}}\n" for n in range(130)),
        (
            *(
                Fault(f"steps.s{n}.needs[0]", f"there is no step 'none{n}'", n + 3)
                for n in range(FAULTS_MAX)
            ),
            Fault("", "and 30 more faults"),
        ),
    ),
]

BAD: Final = [*_tables(), *_LONG]
