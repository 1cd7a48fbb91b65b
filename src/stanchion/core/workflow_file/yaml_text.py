"""YAML text: a parser for the part of YAML that corresponds to JSON.

Values are those of YAML 1.2: ``yes``, ``on``, ``010``, ``0x1f`` and ``2026-01-31`` are strings.
Everything without a counterpart in JSON is a fault: anchors and aliases (a few lines of them expand
to gigabytes), tags, directives, several documents, infinity.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import yaml

from stanchion.core.faults import quoted
from stanchion.core.json_value import JsonValue
from stanchion.core.workflow_file.tree import Scalar, Tree, Unreadable, number

# The C parser if PyYAML was built with it. The pure Python parser is equivalent, but slower.
_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_FORBIDDEN = re.compile(
    "[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
)
_DIRECTIVE = re.compile(r"(?:[ \t]*+(?:#[^\n]*+)?\n)*%")
_NUMBER = re.compile(r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_WORDS: Final[Mapping[str, JsonValue]] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_NO_ALIAS: Final = "YAML anchors and aliases are not allowed; write the value out"


def read_yaml(text: str, tree: Tree, loader: Any = _LOADER) -> None:  # noqa: ANN401 - PyYAML's loaders share no type
    """Parse YAML into the tree. Raises ``Unreadable``."""
    forbidden = _FORBIDDEN.search(text)
    if forbidden is not None:
        line = text.count("\n", 0, forbidden.start()) + 1
        code = f"U+{ord(forbidden[0]):04X}"
        raise Unreadable(f"contains the character {code}, which YAML does not allow", line)
    directive = _DIRECTIVE.match(text)
    if directive is not None:
        # Before parsing: the parser takes quadratic time for directives.
        line = text.count("\n", 0, directive.end()) + 1
        raise Unreadable("YAML directives (lines that begin with %) are not allowed", line)
    try:
        for event in yaml.parse(text, Loader=loader):
            _take(event, tree)
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # The pure parser raises the last two for an escape such as "\U00110000".
        raise _unreadable(error, text) from None
    if not tree.nodes:
        raise Unreadable("the file is empty")


def _take(event: yaml.Event, tree: Tree) -> None:
    assert event.start_mark is not None
    line = event.start_mark.line + 1
    match event:
        case yaml.ScalarEvent():
            tree.add(_scalar(event), line)
        case yaml.AliasEvent():
            alias = f"*{event.anchor}"
            tree.add(Scalar(alias, alias, _NO_ALIAS), line)
        case yaml.MappingStartEvent():
            tree.begin({}, line, _flaw(event))
        case yaml.SequenceStartEvent():
            tree.begin([], line, _flaw(event))
        case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
            tree.end()
        case yaml.DocumentStartEvent() if tree.nodes:
            raise Unreadable("more than one YAML document; a file is one workflow", line)
        case _:
            pass  # begin and end of stream and document


def _scalar(event: yaml.ScalarEvent) -> Scalar:
    word = event.value
    flaw = _flaw(event)
    plain = event.implicit[0] and not flaw
    if plain and word in _WORDS:
        return Scalar(_WORDS[word], word)
    if plain and _NUMBER.fullmatch(word):
        return number(word)
    if plain and _NOT_FINITE.fullmatch(word):
        return Scalar(0, word, "not a finite number")
    return Scalar(word, word, flaw)


def _flaw(event: yaml.ScalarEvent | yaml.CollectionStartEvent) -> str:
    if event.anchor is not None:
        return _NO_ALIAS
    if event.tag is not None:
        return f"YAML tags are not allowed, and {quoted(event.tag)} is one"
    return ""


def _unreadable(error: Exception, text: str) -> Unreadable:
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    if mark is None:
        return Unreadable(f"not YAML: {error}")
    # The parser counts more characters as line breaks, so its row may not exist here.
    row = "".join(text.split("\n")[mark.line : mark.line + 1])
    if row[mark.column : mark.column + 1] == "\t":
        return Unreadable("a tab where YAML allows only spaces", mark.line + 1)
    problem = str(getattr(error, "problem", ""))
    hint = "; a text with ${…} in it is put in quotes" if "${" in row else ""
    return Unreadable(f"not YAML: column {mark.column + 1}: {problem}{hint}", mark.line + 1)
