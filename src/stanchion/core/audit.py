"""The audit log: one entry for each change that a person or a key makes.

The store writes an entry in the same step as the change, so that both exist or neither does.
Entries are never changed. They hold no secrets: a member that could contain one is left out, and
named under ``redacted``.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec

from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.model import Instant, TenantId

LOOKED_AT_FACTOR: Final = 10
"""A page of ``limit`` rows looks at this many times as many."""
SYSTEM: Final = "system"
"""The actor of changes that Stanchion makes by itself."""


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who changed what. ``before`` and ``after`` are ``None`` where nothing existed."""

    action: str
    """What was done, as ``noun.verb``: ``run.cancel``."""
    actor: str
    subject: str
    """What was changed, as ``noun/name``: ``run/<run id>``."""
    tenant: TenantId | None = None
    """``None``: the change concerns the whole deployment."""
    before: JsonValue = None
    after: JsonValue = None
    request_id: str | None = None
    at: Instant = Instant(0)
    """The time of the store when it wrote the entry. Set by the store."""


class AuditFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which entries to list. All conditions must hold."""

    tenant: TenantId | None = None
    actor: str | None = None
    action: str | None = None
    since: Instant | None = None
    until: Instant | None = None
    """Entries before this instant."""

    def fits(self, entry: AuditEntry) -> bool:
        """Whether the entry is to be listed."""
        return (
            self.tenant in {None, entry.tenant}
            and self.actor in {None, entry.actor}
            and self.action in {None, entry.action}
            and (self.since is None or entry.at >= self.since)
            and (self.until is None or entry.at < self.until)
        )


EVERY_ENTRY: Final = AuditFilter()


def changed_members(before: JsonValue, after: JsonValue) -> tuple[JsonValue, JsonValue]:
    """The parts of two documents that differ. A member that is equal in both is left out."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return before, after
    old: JsonObject = {}
    new: JsonObject = {}
    for name in {**before, **after}:
        if name in before and name in after:
            if before[name] != after[name]:
                old[name], new[name] = changed_members(before[name], after[name])
        elif name in before:
            old[name] = before[name]
        else:
            new[name] = after[name]
    return old, new


def redacted(members: Mapping[str, JsonValue], *names: str) -> JsonObject:
    """The members without those named, which may be secret; ``redacted`` names the ones present."""
    present = [name for name in names if members.get(name) is not None]
    shown = {name: value for name, value in members.items() if name not in names}
    return {**shown, "redacted": [*present]} if present else shown


def time_text(instant: Instant | None) -> str | None:
    """The instant as an entry shows it: ISO 8601, in UTC."""
    if instant is None:
        return None
    text: str = msgspec.to_builtins(_EPOCH + timedelta(milliseconds=instant))
    return text


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
