"""Expressions: how a workflow file looks at the data of its run.

An expression is a line of CEL over a few root names: ``input``, ``steps`` and, for the items of a
for-each, ``item`` and ``index``. It is compiled once, when the workflow is registered, and what can
be known to be wrong is said then. It is evaluated with the data of a run, and then it either has a
value or raises ``ExpressionError``.

- Equal data gives equal results, in any process, whatever the order of keys.
- It reaches nothing but its scope, and takes from ``steps`` only what it names: ``references`` is
  the whole of what it can read there.
- It ends soon and its value is not large, whatever the text and whatever the data. What it may
  spend is an ``EvaluationBudget``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, cast

from stanchion.core.cel.budget import SIZE_MAX, WORK_MAX, EvaluationBudget
from stanchion.core.cel.errors import BudgetSpent, ExpressionError, ExpressionFault
from stanchion.core.cel.evaluation import Path, Program, build, follow, path_of
from stanchion.core.cel.library import NESTING_MAX, parse
from stanchion.core.cel.syntax import CallNode, Constant, Has, Loop, Name, Node, Select, children
from stanchion.core.cel.value import described
from stanchion.core.faults import quoted
from stanchion.core.json_value import JsonValue

__all__ = [
    "NESTING_MAX",
    "SIZE_MAX",
    "SOURCE_CHARS_MAX",
    "STEP_FIELDS",
    "WORK_MAX",
    "BudgetSpent",
    "EvaluationBudget",
    "Expression",
    "ExpressionError",
    "ExpressionFault",
    "compile_expression",
    "tokens_in",
]

SOURCE_CHARS_MAX: Final = 2_000
STEP_FIELDS: Final = frozenset({"output", "status"})
"""What ``steps.<id>`` has."""


def compile_expression(
    source: str, *, names: frozenset[str], want_bool: bool = False
) -> Expression:
    """Compile an expression that may use these root names, or raise ExpressionFault."""
    return _compile(source, names, want_bool)


@dataclass(frozen=True, slots=True)
class Expression:
    """An expression that was found good."""

    source: str
    references: frozenset[str]
    """The ids of the steps it reads: ``steps.plan``, ``steps["my-step"]``."""
    uses: frozenset[str]
    """The root names it needs in its scope."""
    want_bool: bool
    # Both follow from the source, and functions cannot be compared.
    _program: Program = field(repr=False, compare=False)
    _path: Path | None = field(repr=False, compare=False)

    @property
    def is_path(self) -> bool:
        """Whether its value is always a part of its scope, so never larger than that."""
        return self._path is not None

    def evaluate(
        self, scope: Mapping[str, JsonValue], budget: EvaluationBudget | None = None
    ) -> JsonValue:
        """The value for this data, or raise ExpressionError.

        Give several evaluations one budget to bound them together; else each has its own.
        """
        for name in self._program.names:
            if name not in scope:
                raise ExpressionError(f"{name} has no value here")
        if self._path is not None:
            value = cast("JsonValue", follow(scope[str(self._path[0])], self._path))
        else:
            budget = EvaluationBudget() if budget is None else budget
            value = budget.keep(self._program.run(scope, budget))
        if self.want_bool and not isinstance(value, bool):
            raise ExpressionError(f"true or false is needed, this is {described(value)}")
        return value


def tokens_in(source: str) -> int:
    """What compiling an expression takes, counted: its words, numbers and signs, and two more."""
    return 2 + len(_TOKEN.findall(source, 0, SOURCE_CHARS_MAX))


_TOKEN = re.compile(r"\w+|[^\w\s]")


@lru_cache(maxsize=1024)
def _compile(source: str, names: frozenset[str], want_bool: bool) -> Expression:  # noqa: FBT001 - keyed by position
    if not source.strip():
        raise ExpressionFault("an expression is needed, this is empty")
    if len(source) > SOURCE_CHARS_MAX:
        raise ExpressionFault(
            f"{len(source)} characters; at most {SOURCE_CHARS_MAX} are allowed in an expression"
        )
    checked = parse(source, names)
    if want_bool and checked.type not in {"BOOL", "DYN"}:
        raise ExpressionFault(f"true or false is needed, this is always {checked.type.lower()}")
    uses, references = _survey(checked.root, names)
    path = path_of(checked.root)
    return Expression(
        source=source,
        references=references,
        uses=uses,
        want_bool=want_bool,
        _program=build(checked.root, tuple(sorted(uses))),
        _path=path if path is not None and path[0] in uses else None,
    )


# ── What an expression reads ─────────────────────────────────────────────────────────────────────


def _survey(root: Node, names: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
    """The root names in use, and the steps that are named."""
    uses: set[str] = set()
    references: set[str] = set()
    pending = [root]
    while pending:
        node = pending.pop()
        container, key = _member(node)
        if _is_steps(container) and key is not None:
            uses.add("steps")
            references.add(key)
            continue
        outer, step = _member(container)
        if _is_steps(outer) and step is not None and key is not None and key not in STEP_FIELDS:
            fields = " and ".join(sorted(STEP_FIELDS))
            raise ExpressionFault(f"a step has {fields}, not {quoted(key)}", node.position)
        match node:
            case Name(name="steps"):
                raise ExpressionFault(
                    'name the step: steps.plan or steps["my-step"], not all steps', node.position
                )
            case Name(name=name) if name in names:
                uses.add(name)
            case Loop(variable=name) if name in names:
                raise ExpressionFault(f"'{name}' is taken: choose another name", node.position)
        pending.extend(children(node))
    return frozenset(uses), frozenset(references)


def _member(node: Node | None) -> tuple[Node | None, str | None]:
    """What the node looks into, and under which key, if that is written down."""
    match node:
        case Select(operand=container, field=key) | Has(operand=container, field=key):
            return container, key
        case CallNode(function="_[_]", arguments=(container, Constant(value=str() as key))):
            return container, key
        case _:
            return None, None


def _is_steps(node: Node | None) -> bool:
    return isinstance(node, Name) and node.name == "steps"
