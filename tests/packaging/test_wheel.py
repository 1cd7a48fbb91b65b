"""The wheel in an empty environment: the SDK alone, and with the extra ``server``."""

from __future__ import annotations

import json
import subprocess
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_bytes
from pathlib import Path

import pytest

from tests.packaging.environment import ROOT, Environment, build_wheel, make_environment
from tests.servers import running_server

SOURCE = ROOT / "src"
CODE = {".css", ".html", ".js", ".json", ".lua", ".md", ".py", ".sql", ".svg", ".txt", ".typed"}
SERVER_PACKAGES = {
    "apsw",
    "redis",
    "nats",
    "starlette",
    "uvicorn",
    "prometheus_client",
    "yaml",
    "jinja2",
}
ON_A_SERVER = {"sim"}
"""Commands that need a server's packages even to explain themselves."""

WORKER = """
import stanchion

app = stanchion.Worker()


@app.task("greet")
async def greet(job: stanchion.Job) -> dict:
    return {"text": f"hello, {job.input['name']}", "fenced": job.fence > 0}
"""

CALLER = """
import asyncio, sys
import stanchion

URL = sys.argv[1]
WORKFLOW = 'id: greet\\nsteps:\\n  greet: {topic: greet, input: "${input}"}\\n'


async def again() -> None:
    async with stanchion.AsyncClient(URL) as client:
        run = await client.start("greet", {"name": "second"})
        print((await run.wait(timeout_s=30)).output["greet"]["text"])


with stanchion.Client(URL) as client:
    client.apply_workflow(WORKFLOW)
    print(client.start("greet", {"name": "first"}).wait(timeout_s=30).output["greet"])
asyncio.run(again())
"""

LEASES = """
import asyncio, stanchion

async def hold(url):
    async with stanchion.Leases(url) as leases, leases.hold("name", wait_s=5) as lease:
        return "held" if lease.fence else "not held"

async def hold_all():
    return [await hold(url) for url in {urls!r}]

print(*asyncio.run(hold_all()))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def sdk(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return make_environment(tmp_path_factory.mktemp("sdk"), wheel)


@pytest.fixture(scope="module")
def whole(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return make_environment(tmp_path_factory.mktemp("server"), wheel, "server")


def test_the_wheel_holds_the_package_its_licence_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    info = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"
    shipped = {name for name in names if not name.startswith(f"{info}/")}
    files = {
        path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*") if path.suffix in CODE
    }
    assert shipped == files
    assert {Path(name).suffix for name in shipped} >= {".py", ".typed", ".sql", ".lua"}
    assert "stanchion/py.typed" in shipped
    assert f"{info}/licenses/LICENSE" in names


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = [name for name in archive.namelist() if name.endswith("/METADATA")]
        told = message_from_bytes(archive.read(metadata))
    assert (told["Name"], told["License-Expression"]) == ("stanchion", "Apache-2.0")
    assert told["Requires-Python"] == ">=3.11"
    assert told.get_all("Provides-Extra") == ["drill", "leases", "otel", "server"]


def test_the_sdk_needs_no_package_of_a_server(sdk: Environment) -> None:
    asks = (
        "import json, sys, stanchion;"
        "stanchion.Client, stanchion.AsyncClient, stanchion.Worker, stanchion.LeaseLost;"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    imported = set(json.loads(sdk.run("python", "-c", asks)))
    assert "stanchion" in imported
    assert not imported & SERVER_PACKAGES
    assert not imported & {"click", "rich"}  # whoever calls from a program pays for no terminal


def test_leases_need_their_extra_and_no_package_of_a_server(wheel: Path, tmp_path: Path) -> None:
    made = make_environment(tmp_path / "leases", wheel, "leases")
    with running_server() as redis:
        program = LEASES.format(urls=[redis.url, "sqlite:leases.db"])
        assert made.run("python", "-c", program).splitlines()[-1] == "held held"
    for package in ("nats", "starlette", "uvicorn", "prometheus_client", "cel_expr_python"):
        made.run("python", "-c", f"import {package}", code=1)


def test_every_public_name_is_there_without_the_extra(sdk: Environment) -> None:
    asks = "import stanchion; print(*(getattr(stanchion, n).__name__ for n in stanchion.__all__))"
    assert {"Client", "Worker", "Leases", "LeaseLost"} <= set(sdk.run("python", "-c", asks).split())


def test_without_the_extra_every_command_explains_itself(sdk: Environment) -> None:
    told = sdk.run("stanchion", "--help")
    listed = {line.split()[0] for line in told.partition("Commands:\n")[2].splitlines() if line}
    assert {"serve", "worker", "workflow", "run", "tenant"} <= listed
    for name in sorted(listed - ON_A_SERVER):
        assert f"stanchion {name}" in sdk.run("stanchion", name, "--help")


def test_without_the_extra_a_server_says_what_to_install(sdk: Environment) -> None:
    told = sdk.run("stanchion", "serve", "--port", "0", "--data-dir", "data", code=1)
    assert "pip install 'stanchion[server]'" in told
    assert "Traceback" not in told
    (sdk.folder / "w.yaml").write_text("id: w\n", encoding="utf-8")
    told = sdk.run("stanchion", "workflow", "check", "w.yaml", code=1)
    assert "parser, which needs the package" in told


def test_a_run_completes_between_an_sdk_and_a_server_from_the_wheel(
    sdk: Environment, whole: Environment
) -> None:
    (sdk.folder / "greeter.py").write_text(WORKER, encoding="utf-8")
    (sdk.folder / "caller.py").write_text(CALLER, encoding="utf-8")
    with server(whole) as url, process(sdk, "stanchion", "worker", "greeter:app", "--url", url):
        told = sdk.run("python", "caller.py", url)
    assert told == "{'text': 'hello, first', 'fenced': True}\nhello, second\n"


@contextmanager
def server(environment: Environment) -> Iterator[str]:
    """A server, at a free port."""
    arguments = ("serve", "--port", "0", "--data-dir", "data")
    with process(environment, "stanchion", *arguments) as serving:
        assert serving.stderr is not None
        said = []
        for line in serving.stderr:
            said.append(line)
            if b'"server_ready"' in line:
                yield str(json.loads(line)["url"])
                return
        raise AssertionError(b"".join(said).decode())


@contextmanager
def process(environment: Environment, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """Something that stays. It is told to stop at the end, and then has to."""
    started = subprocess.Popen(
        [environment.bin / command[0], *command[1:]],
        cwd=environment.folder,
        env=environment.environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            started.kill()
            started.communicate()
