"""Fuzzing: whatever is done to a workflow file, the parser answers with faults or a workflow.

A case is its number: ``check(17)`` makes the same file each time. `make test` tries 500 of them,
`make soak` 10,000.
"""

from __future__ import annotations

import json
import os
import time
from random import Random

import jsonschema_rs
import msgspec
import pytest
import yaml

from stanchion.core.faults import FAULTS_MAX, Findings
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.plan import link
from stanchion.core.workflow import Workflow
from stanchion.core.workflow_file import WorkflowFaults, parse_workflow, workflow_json_schema
from stanchion.core.workflow_file.source import Format, read_source
from tests.core.bad_workflows import BAD
from tests.core.good_workflows import EVERY_MEMBER, NULL_OUTPUT, RESEARCH, SMALLEST

CASES = 10_000 if os.environ.get("STANCHION_TEST_SCALE") == "soak" else 500
BATCHES = 10
ANSWER_S_MAX = 5.0
"""Far above what any case takes: it catches what would never end."""

SCHEMA = jsonschema_rs.Draft202012Validator(workflow_json_schema())
SEEDS = [RESEARCH, EVERY_MEMBER, SMALLEST, NULL_OUTPUT]
TEXTS: list[tuple[bytes, Format]] = [
    *((text.encode(), "yaml") for text in SEEDS),
    *((json.dumps(yaml.safe_load(text), indent=1).encode(), "json") for text in SEEDS),
    *(
        (bad.text if isinstance(bad.text, bytes) else bad.text.encode(), bad.notation)
        for bad in BAD
        if len(bad.text) < 2_000
    ),
]
SHARDS = [
    *(b"&a ", b"*a", b"!!str ", b"<<: ", b"? ", b"- ", b": ", b"---\n", b"...\n", b"%TAG ! x\n"),
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b"#",
        b"|\n",
        b">-\n",
        b"\t",
        b"\r",
        b"\n",
        b"\n  ",
        b"'",
        b'"',
    ),
    *(b"${", b"}", b"$${", b"${steps.plan.output}", b"${item}", b"steps.", b"\\", b"\\u0000"),
    *(b"\x00", b"\xff", b"\xc3\x28", b"\xef\xbb\xbf", b"\xed\xa0\x80", "\u2028".encode()),
    *(b"9" * 30, b"-1", b"1e999", b".nan", b".inf", b"NaN", b"0x1f", b"true", b"null", b"~"),
    *(b"[" * 70, b"{a: " * 70, b"(" * 70, b"a" * 200, b"needs: [plan]", b'"needs": ["plan"],'),
]
WORDS = [
    *("id", "steps", "risk", "topic", "needs", "when", "input", "for_each", "retry", "backoff"),
    *("kind", "delay_s", "approval", "workflow", "timeout_s", "output", "input_schema", "$ref"),
    *(
        "plan",
        "search",
        "a",
        "",
        "a b",
        "\x00",
        "ß",
        "${input.x}",
        "${",
        "input.x == 1",
        "#",
        "x" * 90,
    ),
]


@pytest.mark.parametrize("batch", range(BATCHES))
def test_a_mutated_file_gives_faults_or_a_workflow(batch: int) -> None:
    for number in range(batch, CASES, BATCHES):
        check(number)


def check(number: int) -> None:
    """Hold the parser to its promise for one case."""
    chance = Random(number)
    text, notation = broken_text(chance) if chance.random() < 0.5 else broken_tree(chance)
    if chance.random() < 0.1:
        notation = "json" if notation == "yaml" else "yaml"
    workflow_id = chance.choice([*[None] * 10, "research", "a b"])
    case = f"case {number}: {notation} {text!r}"

    began = time.perf_counter()
    answer = parse_workflow(text, format=notation, workflow_id=workflow_id)
    assert time.perf_counter() - began < ANSWER_S_MAX, case

    assert parse_workflow(text, format=notation, workflow_id=workflow_id) == answer, case
    match answer:
        case WorkflowFaults(found):
            assert 1 <= len(found) <= FAULTS_MAX + 1, case
            assert all(fault.message.isprintable() for fault in found), case
            msgspec.json.encode(answer)
        case Workflow():
            tree = read_source(text, notation, Findings()).tree
            assert isinstance(tree, dict), case
            assert SCHEMA.is_valid({"id": answer.id, **tree}), case
            encoded = msgspec.json.encode(answer)
            assert msgspec.json.decode(encoded, type=Workflow) == answer, case
            link(answer, {})


# ── Breaking the text ────────────────────────────────────────────────────────────────────────────


def broken_text(chance: Random) -> tuple[bytes, Format]:
    """A file of ours with bytes changed, lost, doubled, moved in from elsewhere."""
    sound, notation = chance.choice(TEXTS)
    text = bytearray(sound)
    for _ in range(chance.choice([1, 1, 1, 2, 8])):
        start = chance.randrange(len(text) + 1)
        end = min(len(text), start + chance.choice([0, 1, 1, 2, 8, 40]))
        match chance.randrange(6):
            case 0:
                text[start:end] = bytes(chance.randrange(256) for _ in range(end - start))
            case 1:
                del text[start:end]
            case 2:
                text[start:start] = text[start:end] * chance.choice([1, 2, 30])
            case 3:
                other, _notation = chance.choice(TEXTS)
                cut = chance.randrange(len(other) + 1)
                text[start:end] = other[cut : cut + chance.choice([5, 50, 500])]
            case 4:
                del text[start:]
            case _:
                text[start:end] = chance.choice(SHARDS)
    return bytes(text), notation


# ── Breaking the tree ────────────────────────────────────────────────────────────────────────────


def broken_tree(chance: Random) -> tuple[bytes, Format]:
    """A file of ours that can be read, with values changed, lost, doubled, put elsewhere."""
    tree = yaml.safe_load(chance.choice(SEEDS))
    for _ in range(chance.choice([1, 1, 1, 2, 8])):
        holder = chance.choice(containers(tree))
        match holder, chance.randrange(4):
            case dict(), 0 if holder:
                del holder[chance.choice([*holder])]
            case dict(), 1 if holder:
                key = chance.choice([*holder])
                holder[chance.choice(WORDS)] = holder.pop(key)
            case dict(), 2 if holder:
                holder[chance.choice([*holder])] = strange(chance, tree)
            case dict(), _:
                holder[chance.choice(WORDS)] = strange(chance, tree)
            case list(), 0 if holder:
                del holder[chance.randrange(len(holder))]
            case list(), _:
                holder.insert(chance.randrange(len(holder) + 1), strange(chance, tree))
    if chance.random() < 0.3:
        return yaml.safe_dump(tree, sort_keys=False).encode(), "yaml"
    return json.dumps(tree).encode(), "json"


def containers(tree: JsonValue) -> list[list[JsonValue] | JsonObject]:
    found: list[list[JsonValue] | JsonObject] = []
    waiting = [tree]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            found.append(value)
            waiting.extend(value.values())
        elif isinstance(value, list):
            found.append(value)
            waiting.extend(value)
    return found


def strange(chance: Random, tree: JsonValue) -> JsonValue:
    match chance.randrange(4):
        case 0:
            return chance.choice(WORDS)
        case 1:
            numbers: list[JsonValue] = [0, 1, -1, 3.0, 2.5, 2**63, 1e300, True, None, 10**30]
            return chance.choice(numbers)
        case 2:
            empty: list[JsonValue] = [[], {}, [[]], {"": {}}, {"kind": "fixed"}, ["plan", "plan"]]
            return chance.choice(empty)
        case _:
            # A copy: a tree that holds itself could not be written down.
            part: JsonValue = json.loads(json.dumps(chance.choice(containers(tree))))
            return part
