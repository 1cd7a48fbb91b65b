"""The command line in this process, and the server that it speaks to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import pytest

from stanchion.cli import main
from tests.cli.scripted import Script, running_script

__all__ = ["Cli", "Outcome"]


class Outcome(NamedTuple):
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str


Cli: TypeAlias = Callable[..., Outcome]


@pytest.fixture(scope="package")
def one_server() -> Iterator[Script]:
    with running_script() as script:
        yield script


@pytest.fixture
def server(one_server: Script) -> Script:
    one_server.answers.clear()
    one_server.requests.clear()
    return one_server


@pytest.fixture
def cli(server: Script, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run a command against the scripted server."""
    for name in list(os.environ):
        if name.startswith("STANCHION_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("STANCHION_URL", server.url)
    monkeypatch.setattr("stanchion.cli.runs._APART_S", 0)  # the script answers at once

    def run(*args: str) -> Outcome:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(args)
        assert isinstance(ended.value.code, int)
        return Outcome(int(ended.value.code), *capsys.readouterr())

    return run
