"""Audit entries and receipts: which are listed, what is shown of them, how many are kept."""

from __future__ import annotations

from typing import Any

import pytest

from stanchion.core.audit import (
    EVERY_ENTRY,
    AuditEntry,
    AuditFilter,
    changed_members,
    redacted,
)
from stanchion.core.json_value import JsonValue
from stanchion.core.model import Instant, TenantId
from stanchion.core.receipts import (
    KEPT_MAX,
    Receipt,
    ReceiptFilter,
    newest_kept,
)

ACME = TenantId("acme")
ENTRY = AuditEntry(
    action="run.cancel", actor="kim", subject="run/1", tenant=ACME, at=Instant(1_000)
)
RECEIPT = Receipt(
    at=Instant(1_000),
    tenant=ACME,
    workflow_id="w",
    outcome="full",
    limit=2,
    active=2,
    retry_after_ms=900,
    key="k",
    request_id="q",
    actor="kim",
    replica="r",
)


@pytest.mark.parametrize(
    ("members", "fits"),
    [
        ({"tenant": ACME, "actor": "kim", "action": "run.cancel"}, True),
        ({"tenant": TenantId("globex")}, False),
        ({"actor": "lee"}, False),
        ({"action": "run"}, False),
        ({"since": Instant(1_000)}, True),
        ({"since": Instant(1_001)}, False),
        ({"until": Instant(1_001)}, True),
        ({"until": Instant(1_000)}, False),
    ],
)
def test_an_entry_is_listed_if_all_conditions_hold(members: dict[str, Any], fits: bool) -> None:
    assert AuditFilter(**members).fits(ENTRY) is fits
    assert EVERY_ENTRY.fits(ENTRY)


@pytest.mark.parametrize(
    ("members", "fits"),
    [
        ({"outcome": "full", "key": "k", "request_id": "q"}, True),
        ({"outcome": "mismatch"}, False),
        ({"key": "K"}, False),
        ({"request_id": "other"}, False),
        ({"since": Instant(1_000), "until": Instant(1_001)}, True),
        ({"since": Instant(1_001)}, False),
        ({"until": Instant(1_000)}, False),
    ],
)
def test_a_receipt_is_listed_if_all_conditions_hold(members: dict[str, Any], fits: bool) -> None:
    assert ReceiptFilter(**members).fits(RECEIPT) is fits
    assert ReceiptFilter().fits(RECEIPT)


@pytest.mark.parametrize(
    ("before", "after", "old", "new"),
    [
        (None, {"a": 1}, None, {"a": 1}),
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, {"b": 2}, {"b": 3}),
        ({"a": {"x": 1, "y": 2}}, {"a": {"x": 1, "y": 3}}, {"a": {"y": 2}}, {"a": {"y": 3}}),
        ({"a": 1}, {"b": 1}, {"a": 1}, {"b": 1}),
        ({"a": None}, {"a": 1}, {"a": None}, {"a": 1}),
        ({"a": 1}, {"a": 1}, {}, {}),
    ],
)
def test_an_entry_has_what_changed(
    before: JsonValue, after: JsonValue, old: JsonValue, new: JsonValue
) -> None:
    assert changed_members(before, after) == (old, new)


def test_what_may_be_secret_is_left_out_and_named() -> None:
    members: dict[str, JsonValue] = {"key": "s", "note": None, "role": "admin"}
    assert redacted(members, "key", "note") == {"role": "admin", "redacted": ["key"]}
    assert redacted({"role": "admin"}, "key") == {"role": "admin"}


@pytest.mark.parametrize(
    ("counts", "kept"),
    [
        ([], 0),
        ([1, 2, 3], 3),
        ([KEPT_MAX, 1], 1),
        ([KEPT_MAX - 1, 5, 1], 2),
        ([1] * 2_000, KEPT_MAX),
    ],
)
def test_the_newest_receipts_are_kept(counts: list[int], kept: int) -> None:
    assert newest_kept(counts) == kept
