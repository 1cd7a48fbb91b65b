"""The workflows of simulated days: as files, and as what they mean.

Each document has its expressions twice: as the text that the parser and the evaluator of the
services get, and as a Python function that the oracle in ``meaning`` calls. So what is right is not
decided by the code that is judged. Handlers are pure functions of their job: ``handled`` says what
a worker sends for it, and the oracle what it must have sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple
from zlib import crc32

from msgspec.structs import replace

from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.workflow import Workflow
from stanchion.core.workflow_file import parse_workflow


class StepInScope(NamedTuple):
    """A step as expressions see it."""

    status: str
    output: Any
    failures: tuple[int, ...] = ()
    """The indexes of its failed items."""


class Scope(NamedTuple):
    """What an expression may name."""

    input: Any
    steps: Mapping[str, StepInScope]
    item: Any = None
    at: int | None = None
    """The index of the item."""


class Means(NamedTuple):
    """An expression: its text in the file, and its meaning."""

    text: str
    value: Callable[[Scope], Any]


Document = dict[str, Any]


def _output(name: str) -> Means:
    return Means(f"${{steps.{name}.output}}", lambda seen: seen.steps[name].output)


def _status(name: str) -> Means:
    return Means(f"${{steps.{name}.status}}", lambda seen: seen.steps[name].status)


_NAMES: Final = Means("${steps.list.output.names}", lambda seen: seen.steps["list"].output["names"])
_ITEM: Final = Means("${item}", lambda seen: seen.item)
_INDEX: Final = Means("${index}", lambda seen: seen.at)
_RETRY: Final = {"max_attempts": 2, "backoff": {"kind": "fixed", "delay_ms": 300}}


_FEW: Final = 3


def _list(*names: str) -> Means:
    return Means("${" + json.dumps(names) + "}", lambda _seen: list(names))


def _many(attempts: int) -> Document:
    backoff = {"kind": "exponential", "base_ms": 200, "cap_ms": 2_000}
    return {"max_attempts": attempts, "backoff": backoff}


DOCUMENTS: Final[dict[str, Document]] = {
    "three": {
        "budget": {"tokens": 15},
        "steps": {
            "a": {"topic": "plan"},
            "b": {"topic": "search", "needs": ["a"], "input": {"of": _output("a")}},
            "c": {
                "topic": "write",
                "needs": ["b"],
                "input": {
                    "text": Means(
                        "by ${steps.b.output.by}, at ${steps.b.output.attempt}",
                        lambda seen: (
                            f"by {seen.steps['b'].output['by']},"
                            f" at {seen.steps['b'].output['attempt']}"
                        ),
                    )
                },
            },
        },
    },
    "fan": {
        "risk": "high",
        "budget": {"tokens": 30},
        "steps": {
            "list": {"topic": "plan"},
            "each": {
                "topic": "search",
                "for_each": _NAMES,
                "input": {"name": _ITEM, "place": _INDEX},
                "needs": ["list"],
                "retry": _RETRY,
            },
            "end": {"topic": "write", "needs": ["each"], "input": _output("each")},
        },
    },
    "wide": {
        "risk": "low",
        "budget": {"tokens": 20},
        "max_deliveries": 1,
        "steps": {
            "each": {
                "topic": "quick",
                "for_each": _list("a", "b", "c", "d", "e"),
                "input": _ITEM,
            },
            "beside": {"topic": "quick"},
        },
    },
    "review": {
        "risk": "low",
        "steps": {
            "draft": {"topic": "plan"},
            "review": {
                "needs": ["draft"],
                "approval": {
                    "message": Means(
                        "Publish ${steps.draft.output.by}?",
                        lambda seen: f"Publish {seen.steps['draft'].output['by']}?",
                    ),
                    "timeout_s": 60.0,
                    "on_timeout": "approve",
                },
            },
            "publish": {
                "topic": "write",
                "needs": ["review"],
                "input": {
                    "ok": Means(
                        "${steps.review.output.approved}",
                        lambda seen: seen.steps["review"].output["approved"],
                    )
                },
            },
        },
    },
    "patient": {
        "risk": "critical",
        "steps": {
            "flaky": {"topic": "flaky", "retry": _many(3)},
            "beside": {"topic": "search"},
            "cool": {"delay_s": 2.0, "needs": ["flaky"]},
            "last": {"topic": "write", "needs": ["cool", "beside"]},
        },
    },
    "tolerant": {
        "budget": {"tokens": 40},
        "steps": {
            "each": {
                "topic": "search",
                "for_each": _list("a", "b", "c", "d", "e", "f"),
                "input": {"name": _ITEM},
                "retry": _RETRY,
                "attempt_timeout_s": 8.0,
                "parallel": 2,
                "on_item_failure": "continue",
            },
            "risky": {
                "topic": "flaky",
                "needs": ["each"],
                "attempt_timeout_s": 3.0,
                "on_failure": "continue",
            },
            "end": {
                "topic": "write",
                "needs": ["risky"],
                "input": {
                    "risky": _status("risky"),
                    "missing": Means(
                        "${steps.each.failures.map(f, f.index)}",
                        lambda seen: list(seen.steps["each"].failures),
                    ),
                },
            },
        },
    },
    "items": {
        "steps": {
            "list": {"topic": "plan"},
            "each": {
                "for_each": _list("a", "b", "c", "d"),
                "workflow": "item",
                "input": {
                    "name": _ITEM,
                    "is_first": Means("${index == 0}", lambda seen: seen.at == 0),
                },
                "needs": ["list"],
                "parallel": 2,
                "on_item_failure": "continue",
            },
            "end": {"topic": "write", "needs": ["each"], "input": {"all": _output("each")}},
        },
    },
    "item": {
        "risk": "low",
        "steps": {
            "skip": {
                "topic": "quick",
                "when": Means("input.is_first", lambda seen: seen.input["is_first"]),
            },
            "draft": {
                "topic": "flaky",
                "needs": ["skip"],
                "input": {"name": Means("${input.name}", lambda seen: seen.input["name"])},
                "retry": _RETRY,
                "timeout_s": 5.0,
            },
            "cool": {"delay_s": 0.5, "needs": ["draft"]},
            "check": {"topic": "search", "needs": ["cool"], "attempt_timeout_s": 8.0},
        },
    },
    "nested": {
        "risk": "high",
        "steps": {
            "first": {"topic": "plan"},
            "inner": {"workflow": "three", "needs": ["first"]},
        },
    },
    "routed": {
        "input_schema": {"type": "object", "required": ["n"], "properties": {"n": {}}},
        "steps": {
            "list": {"topic": "plan", "input": {"n": Means("${input.n}", lambda s: s.input["n"])}},
            "many": {
                "topic": "quick",
                "needs": ["list"],
                "when": Means(
                    "size(steps.list.output.names) > 3",
                    lambda seen: len(seen.steps["list"].output["names"]) > _FEW,
                ),
            },
            "few": {
                "topic": "quick",
                "needs": ["list"],
                "when": Means(
                    "!(size(steps.list.output.names) > 3) && input.n != ''",
                    lambda seen: len(seen.steps["list"].output["names"]) <= _FEW,
                ),
            },
            "join": {
                "topic": "write",
                "needs": ["many", "few"],
                "input": {"many": _status("many"), "few": _status("few")},
            },
        },
        "output": {
            "way": Means("${steps.join.output.got}", lambda seen: seen.steps["join"].output["got"]),
            "names": Means(
                "${steps.list.output.names.map(x, x + '!')}",
                lambda seen: [f"{each}!" for each in seen.steps["list"].output["names"]],
            ),
            "for": Means("run ${input.n}", lambda seen: f"run {seen.input['n']}"),
        },
    },
    "hurried": {
        "risk": "low",
        "timeout_s": 6.0,
        "steps": {
            "list": {"topic": "plan"},
            "cool": {"delay_s": 2.0, "needs": ["list"]},
            "each": {
                "topic": "search",
                "for_each": _NAMES,
                "input": _ITEM,
                "needs": ["list"],
                "parallel": 1,
            },
        },
    },
    "bounded": {
        "risk": "standard",
        "steps": {
            "fetch": {
                "topic": "flaky",
                "timeout_s": 1.5,
                "retry": {"max_attempts": 3, "backoff": {"kind": "fixed", "delay_ms": 500}},
                "on_failure": "continue",
            },
            "each": {
                "topic": "search",
                "for_each": _list("p", "q", "r", "s"),
                "input": {"at": _INDEX},
                "timeout_s": 2.5,
                "parallel": 2,
                "on_failure": "continue",
            },
            "part": {
                "workflow": "item",
                "input": {"name": "part", "is_first": False},
                "timeout_s": 3.0,
                "on_failure": "continue",
            },
            "ask": {
                "approval": {"timeout_s": 4.0, "on_timeout": "fail"},
                "on_failure": "continue",
            },
            "end": {
                "topic": "quick",
                "needs": ["fetch", "each", "part", "ask"],
                "input": [_status("fetch"), _status("each"), _status("part"), _status("ask")],
            },
        },
        "output": Means("${steps.end.output.got}", lambda seen: seen.steps["end"].output["got"]),
    },
}
"""By id. ``id`` and a ``timeout_s`` of 900 s are added to the files."""


# ── The files ────────────────────────────────────────────────────────────────────────────────────


def as_written(value: object) -> Any:  # noqa: ANN401 - JSON
    """A part of a document as in its file: expressions as their text."""
    match value:
        case Means(text, _):
            return text
        case dict():
            return {name: as_written(each) for name, each in value.items()}
        case list():
            return [as_written(each) for each in value]
        case _:
            return value


def file_of(workflow_id: str, *, more_s: float = 0.0) -> str:
    """The workflow as a file: every other one as YAML. ``more_s`` is added to its time limit."""
    written = {"id": workflow_id, "timeout_s": 900.0, **as_written(DOCUMENTS[workflow_id])}
    written["timeout_s"] += more_s
    if crc32(workflow_id.encode()) % 2:
        return json.dumps(written)
    return "\n".join(_yaml(written, "")) + "\n"


def _yaml(members: Document, indent: str) -> list[str]:
    lines: list[str] = []
    for name, value in members.items():
        if isinstance(value, dict) and value:
            lines += [f"{indent}{name}:", *_yaml(value, f"{indent}  ")]
        else:
            lines.append(f"{indent}{name}: {json.dumps(value)}")
    return lines


def _parsed(workflow_id: str) -> Workflow:
    text = file_of(workflow_id)
    written = parse_workflow(text, format="json" if text.startswith("{") else "yaml")
    assert isinstance(written, Workflow), written
    return written


WORKFLOWS: Final = tuple(map(_parsed, DOCUMENTS))


def changed(workflow: Workflow, number: int) -> Workflow:
    """Another version of the workflow, with a slightly longer time limit."""
    assert workflow.timeout_s is not None
    return replace(workflow, timeout_s=workflow.timeout_s + 1.0 + number)


# ── What workers do ──────────────────────────────────────────────────────────────────────────────


class Fails(NamedTuple):
    """A handler that raises."""

    message: str
    is_final: bool


def share(*parts: object) -> float:
    """A number in [0, 1) that depends only on the parts, not on earlier draws."""
    return crc32("/".join(map(str, parts)).encode()) / 2**32


def handled(
    seed: int, job_id: str, topic: str, attempt: int, given: JsonValue
) -> JsonValue | Fails:
    """What a worker sends for a job: an output, or a failure."""
    outcome = share("outcome", seed, job_id)
    if topic == "flaky" and attempt == 1 and outcome < 0.7:  # noqa: PLR2004 - most
        return Fails("not this time", is_final=False)
    if outcome > 0.96:  # noqa: PLR2004 - few
        return Fails("never", is_final=True)
    step_id = job_id.partition(":")[2].partition("@")[0].partition("[")[0]
    output: JsonObject = {"by": step_id, "got": given, "attempt": attempt}
    if topic == "plan":
        count = 2 + int(3 * share("names", seed, job_id))
        output["names"] = [f"{share(seed, job_id, each):.3f}" for each in range(count)]
    return output
