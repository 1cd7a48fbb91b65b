"""JSON merge patches (RFC 7396): a document with some of its members changed.

A member of the patch replaces that of the document, ``null`` removes it, and objects are merged
recursively.
"""

from __future__ import annotations

from stanchion.core.faults import Findings, Near, Path
from stanchion.core.json_value import JsonObject, JsonValue


def merged(document: JsonValue, patch: JsonValue) -> JsonValue:
    """The document after the patch. Neither argument is modified."""
    if not isinstance(patch, dict):
        return patch
    result: JsonObject = dict(document) if isinstance(document, dict) else {}
    for name, given in patch.items():
        if given is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), given)
    return result


def note_unknown(document: JsonValue, patch: JsonValue, findings: Findings) -> None:
    """Note every member that the patch removes but the document does not have.

    The RFC allows it, but it is most likely a misspelled name: a reset that would have no effect.
    """
    _note_unknown(document, patch, (), findings)


def _note_unknown(document: JsonValue, patch: JsonValue, path: Path, findings: Findings) -> None:
    if not isinstance(document, dict) or not isinstance(patch, dict):
        return
    for name, given in patch.items():
        if name in document:
            _note_unknown(document[name], given, (*path, name), findings)
        elif given is None:
            findings.note((*path, name), "is not there to be removed", near=Near(name, document))


def changed_paths(before: JsonValue, after: JsonValue) -> tuple[Path, ...]:
    """The paths of the smallest parts that cover all differences of two documents."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return () if before == after else ((),)
    names = [*before, *(name for name in after if name not in before)]
    return tuple(
        (name, *rest) for name in names for rest in changed_paths(before.get(name), after.get(name))
    )
