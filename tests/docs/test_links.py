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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_heading_leads_to_one(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text(encoding="utf-8"))
    ours = [(target, anchor) for target, anchor in targets if "://" not in target]
    pages = [(page.parent / target if target else page, anchor) for target, anchor in ours]
    assert [each for each in pages if each[1] not in _anchors(each[0])] == []


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    text = re.sub(
        r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def test_the_glossary_defines_every_term_once() -> None:
    page = ROOT / "docs" / "explanation" / "glossary.md"
    terms = re.findall(r"^\| ([^|]+) \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    twice = {term for term in terms if terms.count(term) > 1}
    assert twice == {"word"}, "only the heading of the tables is repeated"


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    targets = re.findall(r"\]\(([^)#\s]+)", index.read_text(encoding="utf-8"))
    reached = {(index.parent / target).resolve() for target in targets}
    decisions = set(ROOT.glob("docs/adr/0*.md"))  # their own index names them
    pages = set(ROOT.glob("docs/**/*.md")) - decisions - {index}
    assert sorted(str(page.relative_to(ROOT)) for page in pages - reached) == []


def test_there_are_pages_to_look_at() -> None:
    assert {"README.md", "ARCHITECTURE.md", "workflow-file.md"} <= {page.name for page in PAGES}
