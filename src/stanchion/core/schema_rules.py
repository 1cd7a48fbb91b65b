"""Schema rules: restrictions on input schemas that keep every check short.

A short JSON Schema can take exponential time to check: definitions that each refer to the next one
twice double the work with every line, and one that refers to itself doubles it with every level of
the input. So references must stay within the schema and be free of cycles, the number of subschemas
with all references expanded is limited, and patterns must match in linear time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from typing import Final, NamedTuple, NoReturn

import jsonschema_rs
import msgspec

from stanchion.core.faults import Findings, Path, quoted
from stanchion.core.graph import cycle
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.schema_cost import CheckCost, Levels, cost_of_rules, joined, pattern_char_ns

INPUT_SCHEMA_BYTES_MAX: Final = 64 * 1024
INPUT_SCHEMA_SUBSCHEMAS_MAX: Final = 500
"""Subschemas of a schema, each counted once for every path of references to it."""
INPUT_SCHEMA_PATTERN_BYTES_MAX: Final = 64 * 1024
"""Compiled size of all patterns, counted likewise: the time per character grows with it."""

PATTERN_OPTIONS: Final = jsonschema_rs.RegexOptions(size_limit=INPUT_SCHEMA_PATTERN_BYTES_MAX)

_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS: Final = ("dependencies", "dependentSchemas", "patternProperties", "properties")
_SHELVES: Final = ("$defs", "definitions")
"""Keywords that hold definitions. The second is the older one, still in use."""
_SINGLES: Final = (
    "additionalProperties",
    "contains",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
)


def judge_rules(schema: JsonObject, path: Path, findings: Findings) -> CheckCost | None:
    """The worst-case cost of checking an input; ``None`` if the schema breaks a rule."""
    before = len(findings.noted)
    size = len(msgspec.json.encode(schema))
    if size > INPUT_SCHEMA_BYTES_MAX:
        findings.note(path, f"{size} bytes long; at most {INPUT_SCHEMA_BYTES_MAX} are allowed")
    elif schema.get("$schema", _DIALECT) not in (_DIALECT, f"{_DIALECT}#"):
        findings.note((*path, "$schema"), f'must be "{_DIALECT}" or absent')
    else:
        _judge_form(schema, path, findings)
    if len(findings.noted) > before:
        return None
    walk = _Walk(schema, path, findings)
    walk.follow()
    if len(findings.noted) > before:
        return None
    cost = walk.weigh()
    return cost if len(findings.noted) == before else None


def refuse_remote(uri: str) -> NoReturn:
    """Refuse to fetch a schema: the retriever that the validator gets. Raises ``ValueError``."""
    raise ValueError(f"{uri} is outside the schema")


@functools.cache
def _meta() -> jsonschema_rs.Validator:
    return jsonschema_rs.Draft202012Validator({"$ref": _DIALECT}, retriever=refuse_remote)


def _judge_form(schema: JsonObject, path: Path, findings: Findings) -> None:
    seen: set[tuple[Path, str]] = set()
    for error in _meta().iter_errors(schema):
        at: Path = (*path, *error.instance_path)
        message = error.message
        if at[-1:] == ("type",):
            message = f"must be a type of JSON Schema or a list of them: {_TYPES}"
        # The meta-schema consists of several, each of which reports the same fault.
        if (at, message) not in seen:
            seen.add((at, message))
            findings.note(at, message[:_MESSAGE_CHARS_MAX])


_TOO_LARGE: Final = "the patterns are too large together; shorten their repetitions"
_TYPES: Final = "array, boolean, integer, null, number, object, string"
_MESSAGE_CHARS_MAX: Final = 300


class _Cost(NamedTuple):
    subschemas: int
    pattern_bytes: int
    unique: int
    levels: Levels


@dataclass(slots=True)
class _Walk:
    """All subschemas by their path within the schema, and the subschemas each one applies."""

    schema: JsonObject
    prefix: Path
    findings: Findings
    leads: dict[Path, list[Path]] = field(default_factory=dict)
    pattern_bytes: dict[Path, int] = field(default_factory=dict)
    char_ns: dict[str, float] = field(default_factory=dict)
    """The cost per character of each pattern."""

    def follow(self) -> None:
        """Visit every subschema, including definitions without a reference to them."""
        waiting: list[Path] = [()]
        while waiting:
            place = waiting.pop()
            node = _at(self.schema, place)
            if not isinstance(node, dict) or place in self.leads:
                continue  # `true` and `false` have no subschemas
            self.leads[place] = [*_inner(node, place), *self._referred(node, place)]
            self._judge_names(node, place)
            self._judge_patterns(node, place)
            shelved = [(*place, word, name) for word in _SHELVES for name in _members(node, word)]
            waiting.extend(reversed([*self.leads[place], *shelved]))

    def weigh(self) -> CheckCost | None:
        """Add up the cost of a check. ``None`` if there is a cycle or too many subschemas."""
        circle = cycle(self.leads)
        if circle is not None:
            closing = next(place for place in circle if "$ref" in self._node(place))
            self._note((*closing, "$ref"), "leads back to itself; schemas must not be recursive")
            return None
        if sum(self.pattern_bytes.values()) > INPUT_SCHEMA_PATTERN_BYTES_MAX:
            self._note((), _TOO_LARGE)
            return None
        costs: dict[Path, _Cost] = {}
        for place in TopologicalSorter(self.leads).static_order():
            costs[place] = self._cost(place, costs)
            if costs[place].subschemas > INPUT_SCHEMA_SUBSCHEMAS_MAX:
                # Checked for every subschema, also unused ones, so that the numbers stay small.
                most = INPUT_SCHEMA_SUBSCHEMAS_MAX
                self._note((), f"more than {most} subschemas, once every $ref is followed")
                return None
        if costs[()].pattern_bytes > INPUT_SCHEMA_PATTERN_BYTES_MAX:
            self._note((), _TOO_LARGE)
        return CheckCost(
            levels=costs[()].levels,
            unique=costs[()].unique,
            has_branches=any(
                "anyOf" in self._node(each) or "oneOf" in self._node(each) for each in self.leads
            ),
        )

    def _cost(self, place: Path, costs: Mapping[Path, _Cost]) -> _Cost:
        node = self._node(place)
        repeats = "unevaluatedItems" in node or "unevaluatedProperties" in node
        words = [str(inner[len(place)]) for inner in _inner(node, place)]
        inner = [costs[target] for target in self.leads.get(place, ())]
        named = zip([*words, *["$ref"] * (len(inner) - len(words))], inner, strict=True)
        return _Cost(
            subschemas=1 + sum(cost.subschemas for cost in inner),
            pattern_bytes=self.pattern_bytes.get(place, 0)
            + sum(cost.pattern_bytes for cost in inner),
            unique=(node.get("uniqueItems") is True) + sum(cost.unique for cost in inner),
            levels=joined(
                cost_of_rules(node, self.char_ns.__getitem__),
                [(word, cost.levels) for word, cost in named],
                repeats=repeats,
            ),
        )

    def _referred(self, node: JsonObject, place: Path) -> Iterator[Path]:
        reference = node.get("$ref")
        if not isinstance(reference, str):
            return
        target = _target(self.schema, reference)
        if not reference.startswith("#"):
            wrong = f"{quoted(reference)} is outside the schema; refer to #/$defs/… within it"
            self._note((*place, "$ref"), wrong)
        elif target is None:
            self._note((*place, "$ref"), f"{quoted(reference)} is no place in the schema")
        else:
            yield target

    def _judge_names(self, node: JsonObject, place: Path) -> None:
        if "$dynamicRef" in node:
            self._note((*place, "$dynamicRef"), "not allowed; use $ref")
        for word in ("$id", "$schema"):
            if place and word in node:
                self._note((*place, word), "allowed at the top of the schema only")

    def _judge_patterns(self, node: JsonObject, place: Path) -> None:
        patterns: dict[Path, str] = {
            (*place, "patternProperties", pattern): pattern
            for pattern in _members(node, "patternProperties")
        }
        if isinstance(node.get("pattern"), str):
            patterns[(*place, "pattern")] = str(node["pattern"])
        for at, pattern in patterns.items():
            if sum(self.pattern_bytes.values()) > INPUT_SCHEMA_PATTERN_BYTES_MAX:
                return  # already over the limit, and measuring is slow
            size = _pattern_size(pattern)
            if size is None:
                self._note(at, "not a pattern that can be matched in linear time, or too large")
            else:
                self.pattern_bytes[place] = self.pattern_bytes.get(place, 0) + size
                self.char_ns[pattern] = pattern_char_ns(pattern, size)

    def _node(self, place: Path) -> JsonObject:
        node = _at(self.schema, place)
        return node if isinstance(node, dict) else {}

    def _note(self, place: Path, message: str) -> None:
        self.findings.note((*self.prefix, *place), message)


def _inner(node: JsonObject, place: Path) -> Iterator[Path]:
    """The subschemas that a check of this one applies."""
    for word in _SINGLES:
        if word in node:
            yield (*place, word)
    for word in _LISTS:
        listed = node.get(word)
        if isinstance(listed, list):
            yield from ((*place, word, position) for position in range(len(listed)))
    for word in _MAPS:
        yield from ((*place, word, name) for name in _members(node, word))


def _members(node: JsonObject, word: str) -> Mapping[str, JsonValue]:
    # A reference may point to a value that is no schema, so a keyword may hold any value.
    members = node.get(word)
    return members if isinstance(members, dict) else {}


def _at(schema: JsonObject, place: Path) -> JsonValue:
    node: JsonValue = schema
    for part in place:
        node = node[part]  # type: ignore[index]  # places come from the schema
    return node


def _target(schema: JsonObject, reference: str) -> Path | None:
    """The path of a JSON pointer such as ``#/$defs/name``; ``None`` if there is no schema."""
    node: JsonValue = schema
    place: list[str | int] = []
    pointer = reference.removeprefix("#")
    # The validator decodes percent escapes, so this must do the same.
    if "%" in pointer or (pointer and not pointer.startswith("/")):
        return None
    for token in pointer.split("/")[1:]:
        name = token.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and name in node:
            node = node[name]
            place.append(name)
        elif isinstance(node, list) and name in map(str, range(len(node))):
            node = node[int(name)]
            place.append(int(name))
        else:
            return None
    return tuple(place) if isinstance(node, dict | bool) else None


def _pattern_size(pattern: str) -> int | None:
    """The compiled size, rounded up; ``None`` if it does not compile within the limit."""
    for size in (1_024, 4_096, 16_384, INPUT_SCHEMA_PATTERN_BYTES_MAX):
        options = jsonschema_rs.RegexOptions(size_limit=size)
        try:
            jsonschema_rs.Draft202012Validator({"pattern": pattern}, pattern_options=options)
        except ValueError:
            continue
        return size
    return None
