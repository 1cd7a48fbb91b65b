"""Expressions and templates: how a workflow file reads the data of its run.

An expression is CEL over a few root names: ``input``, ``steps`` and, for the items of a for-each,
``item`` and ``index``. It is compiled once, when the workflow is registered; compiling raises
``ExpressionFault`` for every error that does not depend on data. Evaluating it on the data of a run
returns a value or raises ``ExpressionError``.

- Equal data gives equal results, in every process and for every order of keys.
- An expression reads only its scope. Of ``steps`` it reads only the steps that it names:
  ``references`` is the complete list.
- Time and result size are limited for any text and any data, by an ``EvaluationBudget``.

A template is a JSON value with ``${…}`` holes. A string that is one hole and nothing else becomes
the value of its expression, with its type. In a longer string each hole is replaced by text: a
string as it is, any other value as compact JSON with sorted keys. ``$${`` is an escaped ``${``.
Keys of objects are not templates. A part without holes is returned as it is, not copied, so callers
must not modify what a template renders.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias, cast

from stanchion.core.cel.evaluation import (
    SIZE_MAX,
    WORK_MAX,
    EvaluationBudget,
    Program,
    build,
    follow,
    path_of,
)
from stanchion.core.cel.library import NESTING_MAX, parse
from stanchion.core.cel.syntax import CallNode, Constant, Has, Loop, Name, Node, Select, children
from stanchion.core.cel.value import BudgetSpent, ExpressionError, ExpressionFault, described
from stanchion.core.faults import Path, quoted
from stanchion.core.json_value import JsonValue
from stanchion.core.limits import JSON_DEPTH_MAX

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
    "Template",
    "TemplateFaults",
    "compile_expression",
    "compile_template",
    "template_tokens",
    "tokens_in",
]

SOURCE_CHARS_MAX: Final = 2_000
COMPILED_TOKENS_MAX: Final = 20_000
"""Tokens of all compiled expressions that are kept for the next that is equal."""
STEP_FIELDS: Final = ("output", "status", "error", "failures")
"""The members of ``steps.<id>``."""


def compile_expression(
    source: str, *, names: frozenset[str], want_bool: bool = False
) -> Expression:
    """Compile an expression that may use these root names, or raise ExpressionFault."""
    key = (source, names, want_bool)
    return _COMPILED.get(key) or _COMPILED.put(key, _compile(source, names, want_bool=want_bool))


@dataclass(frozen=True, slots=True)
class Expression:
    """A compiled expression."""

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
        """Whether its value is always a part of its scope, and so never larger."""
        return self._path is not None

    def evaluate(
        self, scope: Mapping[str, JsonValue], budget: EvaluationBudget | None = None
    ) -> JsonValue:
        """Evaluate on this data. Raises ExpressionError.

        Evaluations that share a budget are limited together; by default each has its own.
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
    """The cost of compiling an expression: its number of tokens, and two more."""
    return 2 + len(_TOKEN.findall(source, 0, SOURCE_CHARS_MAX))


_TOKEN = re.compile(r"\w+|[^\w\s]")


_Key: TypeAlias = tuple[str, frozenset[str], bool]


class _CompiledExpressions:
    """Expressions that were compiled or asked for last, in two generations.

    They are counted by their tokens, of which each takes 300 bytes: a thousand expressions of the
    maximum length would take 290 MB. Two threads may use it: at worst one compiles once more, and
    what they count wrongly is forgotten with the generation.
    """

    def __init__(self, tokens_max: int) -> None:
        self._half = tokens_max // 2
        self._tokens = 0
        self._young: dict[_Key, Expression] = {}
        self._old: dict[_Key, Expression] = {}

    def get(self, key: _Key) -> Expression | None:
        """The expression, if it is kept."""
        found = self._young.get(key)
        if found is not None:
            return found
        found = self._old.get(key)
        return None if found is None else self.put(key, found)

    def put(self, key: _Key, compiled: Expression) -> Expression:
        """Keep the expression; returns it."""
        tokens = tokens_in(key[0])
        if self._tokens + tokens > self._half:
            self._old, self._young, self._tokens = self._young, {}, 0
        self._young[key] = compiled
        self._tokens += tokens
        return compiled


_COMPILED: Final = _CompiledExpressions(COMPILED_TOKENS_MAX)


def _compile(source: str, names: frozenset[str], *, want_bool: bool) -> Expression:
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


# ── The names an expression reads ────────────────────────────────────────────────────────────────


def _survey(root: Node, names: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
    """The root names and the steps that the expression uses. Raises ExpressionFault."""
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
            fields = f"{', '.join(STEP_FIELDS[:-1])} and {STEP_FIELDS[-1]}"
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
    """The container that the node reads and the key, if the key is a literal."""
    match node:
        case Select(operand=container, field=key) | Has(operand=container, field=key):
            return container, key
        case CallNode(function="_[_]", arguments=(container, Constant(value=str() as key))):
            return container, key
        case _:
            return None, None


def _is_steps(node: Node | None) -> bool:
    return isinstance(node, Name) and node.name == "steps"


# ── Templates ─────────────────────────────────────────────────────────────────────────────────────

_Scope: TypeAlias = Mapping[str, JsonValue]
_Render: TypeAlias = Callable[[_Scope, EvaluationBudget], JsonValue]


def compile_template(value: JsonValue, *, names: frozenset[str], path: Path = ()) -> Template:
    """Compile the value at ``path`` of a document. Raises TemplateFaults with all faults."""
    compiler = _Compiler(names, root=path)
    render = compiler.render_of(value, path)
    if compiler.faults:
        raise TemplateFaults(compiler.faults)
    expressions = compiler.expressions
    return Template(
        source=value,
        references=frozenset().union(*(one.references for one in expressions)),
        uses=frozenset().union(*(one.uses for one in expressions)),
        _render=render,
    )


def template_tokens(value: JsonValue) -> int:
    """The cost of compiling all expressions in a value: the sum of ``tokens_in``."""
    total = 0
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            if "${" in part:
                holes = [each for each in _parts(part) if not isinstance(each, str)]
                total += sum(tokens_in(hole.source) for hole in holes)
        elif isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            waiting += part.values()
    return total


class TemplateFaults(Exception):
    """All faults of a template, each with its path."""

    def __init__(self, faults: list[tuple[Path, str]]) -> None:
        super().__init__("; ".join(message for _, message in faults))
        self.faults = tuple(faults)


@dataclass(frozen=True, slots=True)
class Template:
    """A compiled template."""

    source: JsonValue
    references: frozenset[str]
    """The ids of the steps its holes read."""
    uses: frozenset[str]
    """The root names its holes need in their scope."""
    # Follows from the source, and functions cannot be compared.
    _render: _Render | None = field(repr=False, compare=False)

    def render(self, scope: _Scope, budget: EvaluationBudget | None = None) -> JsonValue:
        """Fill the holes from this data. Raises ExpressionError.

        All holes share one budget. Templates that share a budget are limited together.
        """
        if self._render is None:
            return self.source
        return self._render(scope, EvaluationBudget() if budget is None else budget)

    evaluate = render
    """Expressions and templates have the same method."""


class _Compiler:
    """Compiles a value to a function, and collects the faults."""

    def __init__(self, names: frozenset[str], root: Path) -> None:
        self.names = names
        self.root = root
        self.expressions: list[Expression] = []
        self.faults: list[tuple[Path, str]] = []

    def render_of(self, value: JsonValue, path: Path) -> _Render | None:
        """The function that renders the value; ``None`` if the value has no holes."""
        match value:
            case str():
                return self._text(value, path)
            case list() | dict() if len(path) - len(self.root) >= JSON_DEPTH_MAX:
                self.faults.append((path, f"nested more than {JSON_DEPTH_MAX} levels deep"))
                return None
            case list():
                return self._list(value, path)
            case dict():
                return self._object(value, path)
            case _:
                return None

    def _list(self, items: list[JsonValue], path: Path) -> _Render | None:
        renders = [self.render_of(item, (*path, at)) for at, item in enumerate(items)]
        changed = [(at, render) for at, render in enumerate(renders) if render is not None]
        if not changed:
            return None

        def render(scope: _Scope, budget: EvaluationBudget) -> JsonValue:
            made = items.copy()
            for at, render_one in changed:
                made[at] = render_one(scope, budget)
            return made

        return render

    def _object(self, members: dict[str, JsonValue], path: Path) -> _Render | None:
        renders = {key: self.render_of(member, (*path, key)) for key, member in members.items()}
        changed = [(key, render) for key, render in renders.items() if render is not None]
        if not changed:
            return None

        def render(scope: _Scope, budget: EvaluationBudget) -> JsonValue:
            made = members.copy()
            for key, render_one in changed:
                made[key] = render_one(scope, budget)
            return made

        return render

    def _text(self, text: str, path: Path) -> _Render | None:
        if "${" not in text:
            return None
        parts: list[str | Expression] = []
        for part in _parts(text):
            match part:
                case str():
                    parts.append(part)
                case _Hole(source=source):
                    try:
                        parts.append(compile_expression(source, names=self.names))
                    except ExpressionFault as fault:
                        self.faults.append((path, f"in {quoted('${' + source + '}')}: {fault}"))
                case _Unclosed(source=source):
                    reason = (
                        "the closing } is missing"
                        if len(source) <= SOURCE_CHARS_MAX
                        else f"no closing brace within {SOURCE_CHARS_MAX} characters"
                    )
                    self.faults.append((path, f"in {quoted(source)}: {reason}"))
        self.expressions += (part for part in parts if isinstance(part, Expression))
        match parts:
            case [Expression() as hole]:
                # A whole template that only selects a part of the data needs no size check.
                return hole.evaluate if path == self.root else _whole(hole)
            case _:
                return _joined(parts)


def _whole(hole: Expression) -> _Render:
    if not hole.is_path:
        return hole.evaluate
    return lambda scope, budget: budget.keep(hole.evaluate(scope, budget))


def _joined(parts: list[str | Expression]) -> _Render:
    def render(scope: _Scope, budget: EvaluationBudget) -> JsonValue:
        return "".join(
            part if isinstance(part, str) else _written(_whole(part)(scope, budget), budget)
            for part in parts
        )

    return render


def _written(value: JsonValue, budget: EvaluationBudget) -> str:
    if isinstance(value, str):
        return value
    try:
        text = _compact_json(value)
    except ValueError as error:
        raise ExpressionError(f"this cannot be written as JSON: {error}") from error
    # Only the value was charged so far. Its text also has brackets, quotes, escapes and digits.
    budget.size(len(text))
    budget.work(3 * text.count(":") + text.count(","))
    return text


_compact_json = json.JSONEncoder(
    separators=(",", ":"), sort_keys=True, ensure_ascii=False, allow_nan=False
).encode


# ── Finding the holes ────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Hole:
    source: str


@dataclass(frozen=True, slots=True)
class _Unclosed:
    source: str


def _parts(text: str) -> Iterator[str | _Hole | _Unclosed]:
    """The parts of a string: text, holes, and an unclosed hole at the end."""
    at = 0
    plain = ""
    while (opening := _OPENING.search(text, at)) is not None:
        plain += text[at : opening.start()]
        if opening[0] == "$${":
            plain += "${"
            at = opening.end()
            continue
        end = _closing(text, opening.end())
        if end is None:
            yield _Unclosed(text[opening.start() :])
            return
        if plain:
            yield plain
        yield _Hole(text[opening.end() : end])
        plain = ""
        at = end + 1
    plain += text[at:]
    if plain:
        yield plain


_OPENING = re.compile(r"\$?\$\{")


def _closing(text: str, start: int) -> int | None:
    """The position of the brace that closes a hole: not one in a literal, comment or map."""
    depth = 0
    # Limited to the length of an expression, so that many braces and quotes cannot make it slow.
    for token in _HOLE_TOKEN.finditer(text, start, start + SOURCE_CHARS_MAX + 1):
        if token[0] == "{":
            depth += 1
        elif token[0] == "}" and depth == 0:
            return token.start()
        elif token[0] == "}":
            depth -= 1
    return None


# The tokens of CEL that may contain a brace. No text matches in two ways, so there is no need to
# backtrack. Possessive only where a single character repeats: with groups, early releases of
# Python 3.11 match wrongly.
_HOLE_TOKEN = re.compile(
    r"""
      [bB]?[rR] (?: '''(?:(?!''').)*''' | \"""(?:(?!\""").)*\""" )
    | [bB]?[rR] (?: '[^'\r\n]*+' | "[^"\r\n]*+" )
    | '''(?:\\.|(?!''')[^\\])*''' | \"""(?:\\.|(?!\""")[^\\])*\"""
    | '(?:\\.|[^'\\\r\n])*' | "(?:\\.|[^"\\\r\n])*"
    | //[^\n]*+
    | \w++
    | .
    """,
    re.VERBOSE | re.DOTALL,
)
