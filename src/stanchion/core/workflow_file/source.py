"""Source: parses the text of a file, YAML or JSON, into a plain tree.

Parsing takes bounded time and never raises. Both formats give the same trees: objects with distinct
string keys, lists, strings, 64-bit integers, finite numbers, true, false, null. The limits on size,
nesting and number of values are checked while parsing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

from stanchion.core.faults import Findings, Path
from stanchion.core.json_value import JsonValue
from stanchion.core.limits import WORKFLOW_FILE_BYTES_MAX
from stanchion.core.workflow_file.json_text import read_json
from stanchion.core.workflow_file.tree import Tree, Unreadable
from stanchion.core.workflow_file.yaml_text import read_yaml

Format: TypeAlias = Literal["yaml", "json"]


class Source(NamedTuple):
    """A tree and the line of each of its nodes."""

    tree: JsonValue
    lines: Mapping[Path, int]
    complete: bool
    """Whether the text was parsed to its end. If not, the tree should not be checked further."""


def read_source(text: bytes | str, notation: Format, findings: Findings) -> Source:
    """Parse the text and note its faults in ``findings``."""
    tree = Tree(findings)
    try:
        decoded = _decoded(text)
        if notation == "json":
            read_json(decoded, tree)
        else:
            read_yaml(decoded, tree)
    except Unreadable as stop:
        findings.note(stop.path, stop.reason, line=stop.line)
        return Source(None, tree.lines, complete=False)
    return Source(tree.root, tree.lines, complete=True)


def _decoded(text: bytes | str) -> str:
    size = len(text) if isinstance(text, bytes) else len(text.encode("utf-8", "surrogatepass"))
    if size > WORKFLOW_FILE_BYTES_MAX:
        raise Unreadable(f"{size} bytes long; at most {WORKFLOW_FILE_BYTES_MAX} are allowed")
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            wrong = f"byte 0x{error.object[error.start]:02x} at offset {error.start}"
            line = error.object.count(b"\n", 0, error.start) + 1
            raise Unreadable(f"not UTF-8: {wrong}", line) from None
    if text.startswith("\ufeff"):
        raise Unreadable("begins with a byte order mark; save it as UTF-8 without one", 1)
    if not text.strip():
        raise Unreadable("the file is empty")
    return text
