"""Drills on a deployment in use: they announce what they do, bound it, and leave nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from stanchion.cli.errors import Exit
from stanchion.drills.callers import DrillTenant
from stanchion.drills.command import AGAINST
from stanchion.drills.processes import ServerProcess, free_port
from tests.drills.test_drills import drill

pytestmark = [pytest.mark.alone, pytest.mark.xdist_group("against")]
KEY = "sk_admin_of-the-drills-0123456789abcdef"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("deployment")
    process = ServerProcess(
        port=free_port(),
        flags=["--data-dir", str(folder / "data")],
        settings={"STANCHION_ADMIN_KEY": KEY},
        log=folder / "server.log",
    )
    with ExitStack() as cleaning:
        cleaning.callback(process.stop)
        process.start()
        yield process


def ask(server: ServerProcess, path: str) -> dict[str, object]:
    async def asked() -> dict[str, object]:
        tenant = DrillTenant([server.url], "default", api_key=KEY)
        try:
            answer: dict[str, object] = await tenant.expect("GET", path)
            return answer
        finally:
            await tenant.close()

    return asyncio.run(asked())


def test_a_drill_leaves_no_tenant_and_no_setting_behind(
    server: ServerProcess, tmp_path: Path
) -> None:
    settings = ask(server, "/v1/admin/settings")
    arguments = ("admission", "--quick", "--against", server.url, "--out", str(tmp_path))
    done = drill(*arguments, STANCHION_API_KEY=KEY)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stderr.splitlines()[0]
    assert said.startswith(f"on {server.url}, in tenants drill-…"), said
    tenants = ask(server, "/v1/admin/tenants")["tenants"]
    assert isinstance(tenants, list)
    assert not any(each["is_configured"] or each["active"] for each in tenants)
    assert ask(server, "/v1/admin/settings") == settings
    assert KEY not in (tmp_path / "admission" / "report.json").read_text(encoding="utf-8")


def test_without_a_good_key_it_could_not_run(server: ServerProcess, tmp_path: Path) -> None:
    arguments = ("admission", "--quick", "--against", server.url, "--out", str(tmp_path))
    done = drill(*arguments, STANCHION_API_KEY="sk_wrong")
    assert done.returncode == Exit.USAGE
    assert "401" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["fallback", "renewal", "lock-busy"])
def test_what_would_break_a_deployment_has_no_against(name: str) -> None:
    done = drill(name, "--against", "http://127.0.0.1:9")
    assert done.returncode == Exit.USAGE
    assert f"take one of: {', '.join(AGAINST)}" in done.stderr


@pytest.mark.parametrize("url", ["nonsense", "ftp://x", "http://u:p@x"])
def test_an_address_that_is_none_is_named(url: str, tmp_path: Path) -> None:
    done = drill("retry", "--against", url, "--out", str(tmp_path))
    assert done.returncode == Exit.USAGE
    assert "--against: " in done.stderr
    assert "Traceback" not in done.stderr
