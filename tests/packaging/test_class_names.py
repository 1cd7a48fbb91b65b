"""One name means one thing: no two public classes in ``src`` share a name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import stanchion

_ROOT = Path(stanchion.__file__).parent
_SHARED = {
    "Job": {"core/model.py", "worker/job.py"},  # the public name of what a handler gets
    "LeasedJob": {"ports/records.py", "wire/worker.py"},  # the value, and its form on the wire
}
"""A wire type or a public name of the SDK may be called like the value that it carries."""


def test_no_two_public_classes_share_a_name() -> None:
    places: defaultdict[str, set[str]] = defaultdict(set)
    for file in sorted(_ROOT.rglob("*.py")):
        place = file.relative_to(_ROOT).as_posix()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                line = f"{place}:{node.lineno}" if place in places[node.name] else place
                places[node.name].add(line)
    assert len(places) > 500
    assert {name: where for name, where in places.items() if len(where) > 1} == _SHARED
