"""Ranges: stated once at a value's member, and used by its parser, its checks and its options."""

from __future__ import annotations

from math import inf, nan
from typing import Annotated, Any

import click
import msgspec
import pytest
from msgspec import Meta

from stanchion.cli.session import number_in
from stanchion.core.escalation import Escalation
from stanchion.core.faults import Fault
from stanchion.core.json_value import JsonValue
from stanchion.core.lease import LeasePolicy
from stanchion.core.queue import QueueMax, QueueWaitS
from stanchion.core.ranges import Range, check_ranges, range_faults, range_of, ranges_of
from stanchion.core.retry import BoundedJitter
from stanchion.core.settings import AdmissionSettings, LockBusy, read_settings, settings_json_schema


class _Example(msgspec.Struct):
    size: Annotated[int, Meta(ge=1, le=9)]
    share: Annotated[float, Meta(ge=0.000_001, le=1)] | None = None
    named: Annotated[int, Meta(ge=0, le=5, description="Text beside the range.")] = 0
    positive: Annotated[int, Meta(ge=1)] = 1
    text: str = ""


def test_the_ranges_of_a_value_are_those_of_its_annotations() -> None:
    assert dict(ranges_of(_Example)) == {
        "size": Range(1, 9, is_integer=True),
        "share": Range(0.000_001, 1, is_integer=False),
        "named": Range(0, 5, is_integer=True),
    }


def test_every_member_out_of_its_range_is_a_fault() -> None:
    assert range_faults(_Example(1)) == range_faults(_Example(9, 1, 5)) == ()
    assert range_faults(_Example(0, nan, 6)) == (
        Fault("size", "must be from 1 to 9"),
        Fault("share", "must be from 0.000001 to 1"),
        Fault("named", "must be from 0 to 5"),
    )
    assert range_faults(_Example(10, inf)) == (
        Fault("size", "must be from 1 to 9"),
        Fault("share", "must be from 0.000001 to 1"),
    )


def test_a_value_made_out_of_its_range_raises() -> None:
    check_ranges(_Example(9))
    with pytest.raises(ValueError, match=r"^size must be from 1 to 9$"):
        check_ranges(_Example(10, nan))


@pytest.mark.parametrize(
    ("place", "struct"),
    [
        ("admission", AdmissionSettings),
        ("admission.lock_retry", BoundedJitter),
        ("lock_busy", BoundedJitter),
        ("lock_busy", LockBusy),
        ("policies.low", LeasePolicy),
        ("escalation", Escalation),
    ],
)
def test_the_settings_are_parsed_with_the_ranges_of_their_values(
    place: str, struct: type[msgspec.Struct]
) -> None:
    schema: Any = settings_json_schema()
    for name in place.split("."):
        schema = schema["properties"][name]
    ranges = ranges_of(struct)
    assert ranges
    for name, (low, high, _) in ranges.items():
        member = schema["properties"][name]
        assert (member["minimum"], member["maximum"]) == (low, high)
        for outside in (low - 1, high + 1):
            document: JsonValue = {name: outside}
            for outer in reversed(place.split(".")):
                document = {outer: document}
            found = read_settings(document, run_lease_ttl_ms=10**9)
            wrong = Fault(f"{place}.{name}", f"must be from {low} to {high}; {outside} is not")
            assert isinstance(found, tuple)
            assert wrong in found


def test_an_option_of_the_command_line_takes_the_range_of_its_member() -> None:
    count, seconds = number_in(QueueMax), number_in(QueueWaitS)
    assert isinstance(count, click.IntRange)
    assert (count.min, count.max) == range_of(QueueMax)[:2]
    assert isinstance(seconds, click.FloatRange)
    assert (seconds.min, seconds.max) == range_of(QueueWaitS)[:2]
