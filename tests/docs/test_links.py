"""Every link to a file of ours leads to one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    ours = [target for target in targets if "://" not in target]
    assert [target for target in ours if not (page.parent / target).exists()] == []


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    targets = re.findall(r"\]\(([^)#\s]+)", index.read_text(encoding="utf-8"))
    reached = {(index.parent / target).resolve() for target in targets}
    decisions = set(ROOT.glob("docs/adr/0*.md"))  # their own index names them
    pages = set(ROOT.glob("docs/**/*.md")) - decisions - {index}
    assert sorted(str(page.relative_to(ROOT)) for page in pages - reached) == []


def test_there_are_pages_to_look_at() -> None:
    assert {"README.md", "ARCHITECTURE.md", "workflow-file.md"} <= {page.name for page in PAGES}
