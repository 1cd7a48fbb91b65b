"""Stacks that tests share, and callers of tenants that they do not.

A test that stops or kills servers starts a stack of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Generator, Iterator

import pytest

from tests.acceptance.caller import Caller, calling
from tests.acceptance.stack import Kind, Stack, running_stack


class Shared:
    """The stack that is running at the moment: one at a time, since each of them costs."""

    def __init__(self) -> None:
        self._cleaning = contextlib.ExitStack()
        self._stack: Stack | None = None

    def stack(self, kind: Kind) -> Stack:
        if self._stack is None or self._stack.kind is not kind:
            self.close()
            self._stack = self._cleaning.enter_context(running_stack(kind))
        return self._stack

    def close(self) -> None:
        self._stack = None
        self._cleaning.close()


@pytest.fixture(scope="session")
def shared() -> Iterator[Shared]:
    shared = Shared()
    yield shared
    shared.close()


@pytest.fixture(params=list(Kind), ids=str)
def stack(request: pytest.FixtureRequest, shared: Shared) -> Stack:
    """Every stack in turn; a test for some of them says which, with ``indirect``."""
    return shared.stack(request.param)


@pytest.fixture
async def caller(stack: Stack) -> AsyncIterator[Caller]:
    """Somebody of a tenant that nobody else uses."""
    async with calling(stack.urls) as caller:
        yield caller


@pytest.fixture
async def settings_kept(caller: Caller) -> AsyncIterator[None]:
    """The test may change settings: they are put back."""
    before = await caller.settings()
    yield
    answer = await caller.patch_settings(before)
    assert answer.status == 200, answer.text


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one stack follow each other, so that each is started once.

    Those with a stack of their own take longest. They come first, so that of several processes
    none is left with a long one at the end.
    """
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    if not item.nodeid.startswith("tests/acceptance/"):
        return -1
    if "/test_schema.py" in item.nodeid:
        return 0
    # Only what is parametrised has a call specification.
    spec = getattr(item, "callspec", None)
    kind = None if spec is None else spec.params.get("stack")
    return 1 if kind is None else 2 + list(Kind).index(kind)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the servers said when a test fails."""
    report = yield
    if report.failed and isinstance(item, pytest.Function):
        for given in item.funcargs.values():
            if isinstance(given, Stack):
                report.sections.append((f"servers of {given.kind}", given.last_words()))
    return report
