"""Every bad file hears exactly what is wrong with it, all at once."""

from __future__ import annotations

import jsonschema_rs
import pytest

from stanchion.core.faults import Findings
from stanchion.core.workflow_file import WorkflowFaults, parse_workflow, workflow_json_schema
from stanchion.core.workflow_file.source import read_source
from tests.core.bad_workflows import BAD, Bad

SCHEMA = jsonschema_rs.Draft202012Validator(workflow_json_schema())


def readable(bad: Bad) -> bool:
    findings = Findings()
    return read_source(bad.text, bad.notation, findings).complete and not findings.noted


def by_name(bad: Bad) -> str:
    return bad.name


@pytest.mark.parametrize("bad", BAD, ids=by_name)
def test_a_bad_file_hears_exactly_what_is_wrong_with_it(bad: Bad) -> None:
    assert parse_workflow(bad.text, format=bad.notation) == WorkflowFaults(bad.faults)


@pytest.mark.parametrize("bad", [bad for bad in BAD if readable(bad)], ids=by_name)
def test_the_published_schema_refuses_a_bad_file_exactly_if_its_shape_is_at_fault(bad: Bad) -> None:
    tree = read_source(bad.text, bad.notation, Findings()).tree

    assert SCHEMA.is_valid(tree) == (not bad.structural)


def test_the_table_is_as_long_as_promised() -> None:
    assert len(BAD) >= 40
    assert len({bad.name for bad in BAD}) == len(BAD)
