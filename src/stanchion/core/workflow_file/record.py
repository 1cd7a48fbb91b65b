"""Records: the shapes of objects with known members, alone and as alternatives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from stanchion.core.faults import Findings, Near, Path, listed
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.workflow_file.shape import UNFIT, Shape, Text, Unfit, Word, fit, unfit

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Member:
    """One member of a record: its shape and its description."""

    shape: Shape[Any]
    says: str
    required: bool = False


@dataclass(frozen=True, slots=True)
class Record(Generic[_T]):
    """An object with known members, and no others."""

    noun: str
    """With its article: ``a delay step``."""
    members: Mapping[str, Member]
    build: Callable[..., _T]
    check: Callable[[_T], Iterable[tuple[str | Path, str]]] = lambda _built: ()
    """Rules between members: yields the name or path of the faulty member, and the reason."""

    def read(self, value: JsonValue, path: Path, findings: Findings) -> _T | Unfit:
        if not isinstance(value, dict):
            return unfit("an object", value, path, findings)
        before = len(findings.noted)
        good = {}
        for name, given in value.items():
            if name in self.members:
                good[name] = fit(self.members[name].shape, given, (*path, name), findings)
            elif findings.clean((*path, name)):
                wrong = f"not a member of {self.noun}, which may have {listed([*self.members])}"
                findings.note((*path, name), wrong, near=Near(name, self.members.keys()))
        for name, member in self.members.items():
            if member.required and name not in value:
                findings.note((*path, name), f"missing; {self.noun} must have it")
        if len(findings.noted) > before or any(read is UNFIT for read in good.values()):
            return UNFIT
        built = self.build(**good)
        for where, wrong in self.check(built):
            inner = (where,) if isinstance(where, str) else where
            findings.note((*path, *inner), wrong)
        return built if len(findings.noted) == before else UNFIT

    def schema(self) -> JsonObject:
        required: list[JsonValue] = [name for name, m in self.members.items() if m.required]
        said: JsonObject = {
            "type": "object",
            "properties": {
                name: {"description": member.says, **member.shape.schema()}
                for name, member in self.members.items()
            },
            "additionalProperties": False,
        }
        return {**said, "required": required} if required else said


# ── Alternatives ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Tagged(Generic[_T]):
    """One of several records, chosen by the member ``tag``."""

    tag: str
    records: Mapping[str, Record[_T]]

    def read(self, value: JsonValue, path: Path, findings: Findings) -> _T | Unfit:
        if not isinstance(value, dict):
            return unfit("an object", value, path, findings)
        at = (*path, self.tag)
        if self.tag not in value:
            findings.note(at, f"missing; it must be {listed([*self.records])}")
            return UNFIT
        record = fit(Word(self.records), value[self.tag], at, findings)
        if isinstance(record, Unfit):
            return UNFIT
        rest = {name: given for name, given in value.items() if name != self.tag}
        return record.read(rest, path, findings)

    def schema(self) -> JsonObject:
        return {"oneOf": [self._tagged(word, record) for word, record in self.records.items()]}

    def _tagged(self, word: str, record: Record[_T]) -> JsonObject:
        said = Member(Word({word: word}), f"Makes it {record.noun}.", required=True)
        return Record(record.noun, {self.tag: said, **record.members}, record.build).schema()


@dataclass(frozen=True, slots=True)
class ByMember(Generic[_T]):
    """One of several records, chosen by which of these members is present."""

    noun: str
    records: Mapping[str, Record[_T]]

    def read(self, value: JsonValue, path: Path, findings: Findings) -> _T | Unfit:
        if not isinstance(value, dict):
            return unfit("an object", value, path, findings)
        given = [name for name in self.records if name in value]
        if len(given) == 1:
            return self.records[given[0]].read(value, path, findings)
        has = listed(given, "and") or "none"
        wrong = f"must have exactly one of {listed([*self.records])}; it has {has}"
        findings.note(path, wrong)
        # The record is unknown, but its members can be checked.
        self._any().read(value, path, findings)
        return UNFIT

    def _any(self) -> Record[None]:
        members: dict[str, Member] = {}
        for record in self.records.values():
            for name, member in record.members.items():
                members.setdefault(name, Member(member.shape, member.says))
        return Record(self.noun, members, lambda **_members: None)

    def schema(self) -> JsonObject:
        return {"oneOf": [record.schema() for record in self.records.values()]}


@dataclass(frozen=True, slots=True)
class ObjectOr:
    """An object with any members, or a string of one form. The rule of the string is shown."""

    text: Text

    def read(self, value: JsonValue, path: Path, findings: Findings) -> JsonValue | Unfit:
        if isinstance(value, dict):
            return value
        if isinstance(value, str):
            return self.text.read(value, path, findings)
        return unfit(self.text.rule, value, path, findings)

    def schema(self) -> JsonObject:
        return {"anyOf": [{"type": "object"}, self.text.schema()]}
