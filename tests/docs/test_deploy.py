"""The page about deploying, command by command, with addresses and folders of our own.

``0.0.0.0`` is tried only as far as it is refused: nothing of ours listens to strangers in a test.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import click
import pytest

import stanchion
from stanchion.cli.app import app
from stanchion.drills.processes import free_port
from tests.docs.terminal import PATIENCE_S, ROOT, Block, Terminal, blocks_of, ready_url, serving
from tests.servers import NatsServer, Server, running_nats, running_server

PAGE = ROOT / "docs" / "how-to" / "deploy.md"
KINDS = [
    *("server", "backup", "", "replica", "two-install", "two-servers", "two-callers"),
    *("keys", "revoke", "upgrade", "scrape-key", "yaml"),
]
ADMIN_KEY = "an-admin-key-of-our-own"
WORKFLOW = 'id: echo\nsteps:\n  echo: {topic: echo, input: "${input}"}\n'
WORKER = """
import stanchion

app = stanchion.Worker()


@app.task("echo")
async def echo(job):
    return job.input
"""


def block(kind: str) -> Block:
    [found] = [each for each in blocks_of(PAGE) if each.kind == kind]
    return found


def command(kind: str) -> str:
    [line] = block(kind).lines
    return line


@pytest.fixture(scope="module")
def redis() -> Iterator[Server]:
    with running_server() as server:
        yield server


@pytest.fixture(scope="module")
def nats() -> Iterator[NatsServer]:
    with running_nats() as server:
        yield server


@pytest.fixture
def replica(redis: Server, nats: NatsServer) -> str:
    """The command for a replica, with addresses of ours."""
    return (
        command("replica")
        .replace("redis://redis.internal:6379", redis.url)
        .replace("nats://nats.internal:4222", nats.url)
    )


def test_every_block_is_of_a_kind_that_is_run_here() -> None:
    assert [each.kind for each in blocks_of(PAGE)] == KINDS


@pytest.mark.skipif(shutil.which("sqlite3") is None, reason="needs sqlite3 to make a backup")
def test_one_process_keeps_its_runs_and_a_backup_brings_them_back(tmp_path: Path) -> None:
    def ours(line: str) -> str:
        line = line.replace("/var/lib/stanchion", "data")
        return line.replace("/var/backups/stanchion.db", "copy.db")

    with serving(tmp_path, f"{ours(command('server'))} --port 0") as url:
        with stanchion.Client(url) as client:
            client.apply_workflow(WORKFLOW)
            run_id = client.start("echo", {}).run_id
        Terminal(tmp_path).type(ours(command("backup")))
    (tmp_path / "restored").mkdir()
    (tmp_path / "copy.db").rename(tmp_path / "restored" / "stanchion.db")
    restored = "stanchion serve --port 0 --data-dir restored"
    with serving(tmp_path, restored, log="restored.log") as url, stanchion.Client(url) as client:
        assert client.get(run_id).workflow_id == "echo"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a key")
def test_the_first_key_is_one_that_a_server_takes(tmp_path: Path) -> None:
    [line] = block("").lines
    told = Terminal(tmp_path).type(f"{line}; printf %s $STANCHION_ADMIN_KEY")
    assert 16 <= len(told) <= 255
    assert told.isalnum()


def test_strangers_are_refused_until_there_is_a_key(tmp_path: Path, replica: str) -> None:
    Terminal(tmp_path).type(f"{replica} 2> refused.log", code=1)
    assert "STANCHION_ADMIN_KEY" in (tmp_path / "refused.log").read_text(encoding="utf-8")


def test_replicas_share_runs_and_keys_and_drain_when_told(tmp_path: Path, replica: str) -> None:
    local = replica.replace("0.0.0.0", "127.0.0.1") + " --port 0"  # noqa: S104 - taken out here
    shell = Terminal(tmp_path, STANCHION_ADMIN_KEY=ADMIN_KEY)
    with ExitStack() as stack:
        logs = [tmp_path / "first.log", tmp_path / "second.log"]
        servers = [stack.enter_context(shell.background(local, log)) for log in logs]
        first, second = (ready_url(*each) for each in zip(servers, logs, strict=True))

        operator = Terminal(tmp_path, first, STANCHION_ADMIN_KEY=ADMIN_KEY)
        keys = made_keys(operator)
        (tmp_path / "echoes.py").write_text(WORKER, encoding="utf-8")
        worker = Terminal(tmp_path, second, STANCHION_API_KEY=keys["worker"])
        stack.enter_context(
            worker.background("stanchion worker echoes:app", tmp_path / "worker.log")
        )
        with stanchion.Client(first, api_key=keys["runner"]) as caller:
            caller.apply_workflow(WORKFLOW)
            run_id = caller.start("echo", {"said": "hello"}).run_id
        with stanchion.Client(second, api_key=keys["runner"]) as caller:
            ended = caller.wait(run_id, timeout_s=PATIENCE_S)
            assert (ended.status, ended.output) == ("succeeded", {"echo": {"said": "hello"}})

            key_id = keys["runner"].split("_")[1]
            operator.environ["STANCHION_API_KEY"] = ADMIN_KEY
            operator.type(command("revoke").replace("KEY_ID", key_id))
            until_unknown(caller, run_id)
        scraping = json.loads(operator.type(f"{command('scrape-key')} -o json"))["key"]
        asked = urllib.request.Request(  # noqa: S310 - our own, over http
            f"{second}/metrics", headers={"Authorization": f"Bearer {scraping}"}
        )
        with urllib.request.urlopen(asked) as scraped:  # noqa: S310 - our own, over http
            assert b"stanchion_admission_decisions_total" in scraped.read()

        for server in servers:
            server.send_signal(signal.SIGTERM)
        assert [server.wait(12) for server in servers] == [0, 0]


def test_two_replicas_on_one_machine_go_on_when_one_is_killed(tmp_path: Path) -> None:
    ports = {each: str(free_port()) for each in ("6379", "4222", "8420", "8421")}

    def ours(line: str) -> str:
        return re.sub("|".join(ports), lambda found: ports[found[0]], line)

    shell = Terminal(tmp_path)
    shell.type(block("two-install").lines[1])
    valkey, nats, *replicas = map(ours, block("two-servers").lines)
    export, listing = map(ours, block("two-callers").lines)
    with ExitStack() as stack:
        for name, line in (("valkey", valkey), ("nats", nats)):
            stack.enter_context(shell.background(line, tmp_path / f"{name}.log"))
        for port in (ports["6379"], ports["4222"]):
            until_open(int(port))
        logs = [tmp_path / "first.log", tmp_path / "second.log"]
        servers = [
            stack.enter_context(shell.background(line, log))
            for line, log in zip(replicas, logs, strict=True)
        ]
        for server, log in zip(servers, logs, strict=True):
            ready_url(server, log)
        (tmp_path / "echo.yaml").write_text(WORKFLOW, encoding="utf-8")
        shell.type(f"{export}; stanchion workflow apply echo.yaml")
        ends = time.monotonic() + PATIENCE_S  # a replica reports itself within three seconds
        while len(json.loads(shell.type(f"{export}; {listing} -o json"))["replicas"]) < len(
            servers
        ):
            assert time.monotonic() < ends
        servers[0].kill()
        assert "running" in shell.type(f"{export}; stanchion run start echo")


def until_open(port: int) -> None:
    """Wait until a server listens at the port."""
    ends = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise AssertionError(f"nothing listens at port {port}")


def made_keys(operator: Terminal) -> dict[str, str]:
    """Type the page's lines in one shell, as JSON, so that the keys can be used."""
    export, *commands = block("keys").lines
    assert export.startswith("export STANCHION_URL=https://stanchion.internal ")
    begin = export.replace("https://stanchion.internal", operator.url)
    told = operator.type(f"{begin}; " + "; echo ,; ".join(f"{each} -o json" for each in commands))
    *made, listed = json.loads(f"[{told}]")
    assert len(listed["keys"]) == len(made) == 4
    return {each["role"]: each["key"] for each in made}


def until_unknown(caller: stanchion.Client, run_id: str) -> None:
    """A revoked key is known for two seconds at most, on every replica."""
    ends = time.monotonic() + 3
    while time.monotonic() < ends:
        try:
            caller.get(run_id)
        except stanchion.Unauthenticated:
            return
        time.sleep(0.1)
    raise AssertionError("a revoked key is still good")


def test_an_upgrade_is_finished_with_commands_that_exist() -> None:
    for line in block("upgrade").lines:
        program, *words = line.split()
        assert program == "stanchion"
        command_of: click.Command = app
        for word in words:
            assert isinstance(command_of, click.Group)
            found = command_of.get_command(click.Context(command_of), word)
            assert found is not None, line
            command_of = found
