"""Shows every verdict at the end, and what servers said when something does not hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest

from tests.chaos.verdict import Verdict, show, write_report

_VERDICTS: Final = pytest.StashKey[list[Verdict]]()


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Callable[[Verdict], None]:
    """Keep a verdict for the end, and write it into the report."""

    def keep(verdict: Verdict) -> None:
        request.config.stash.setdefault(_VERDICTS, []).append(verdict)
        write_report(verdict)

    return keep


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    verdicts = terminalreporter.config.stash.get(_VERDICTS, [])
    if verdicts:
        terminalreporter.section("chaos")
    for verdict in verdicts:
        for line in show(verdict):
            terminalreporter.write_line(line)
        terminalreporter.write_line("")
