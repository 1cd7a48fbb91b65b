"""A real server, from its first line to its end, and real commands against it."""

from __future__ import annotations

import json
import signal
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stanchion.cli.errors import Exit
from tests.cli.terminal import on_terminal, plain_environment


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    with served(tmp_path) as process:
        yield process


@contextmanager
def served(tmp_path: Path, *flags: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    serve = ("serve", "--port", "0", "--data-dir", str(tmp_path), *flags)
    process = subprocess.Popen(
        [sys.executable, "-m", "stanchion", *serve],
        env=plain_environment() | environment,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        umask=0o022,  # files are for others to read, unless the server says otherwise
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ready(process: subprocess.Popen[str]) -> dict[str, str]:
    assert process.stderr is not None
    for line in process.stderr:
        event: dict[str, str] = json.loads(line)
        if event["event"] == "server_ready":
            return event
    raise AssertionError("it ended before it was ready")


def stanchion(url: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stanchion", *args, "--url", url, "-o", "json"],
        env=plain_environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_a_server_says_where_it_is_takes_commands_and_stops_when_told(
    serving: subprocess.Popen[str], tmp_path: Path
) -> None:
    event = ready(serving)
    assert event["store"] == f"sqlite:{tmp_path}/stanchion.db"
    assert (event["bus"], event["admin_key"]) == ("local:", "not given")
    url = event["url"]
    file = tmp_path / "ping.yaml"
    file.write_text("id: ping\nsteps:\n  ping: {topic: ping}\n", encoding="utf-8")
    assert json.loads(stanchion(url, "workflow", "apply", str(file)).stdout)["version"] == 1
    capped = stanchion(url, "tenant", "set", "acme", "--max-concurrent-runs", "1")
    assert json.loads(capped.stdout)["max_concurrent_runs"] == 1
    assert stanchion(url, "run", "show", "nothing").returncode == Exit.NOT_FOUND
    started = stanchion(url, "run", "start", "ping")
    run_id = json.loads(started.stdout)["run_id"]
    cancelled = stanchion(url, "run", "cancel", run_id)
    assert json.loads(cancelled.stdout)["run_id"] == run_id
    assert stanchion(url, "run", "watch", run_id).returncode == Exit.FAILED
    with urllib.request.urlopen(f"{url}/metrics") as scraped:  # noqa: S310 - our own, over http
        assert b"_created" not in scraped.read()
    serving.send_signal(signal.SIGTERM)
    _, said = serving.communicate(timeout=15)
    events = [json.loads(line) for line in said.splitlines()]
    assert [(line["event"], line["level"]) for line in events[-2:]] == [
        ("server_draining", "INFO"),
        ("server_stopped", "INFO"),
    ]
    assert serving.returncode == 0


def scraped(url: str, key: str | None = None) -> int:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    asked = urllib.request.Request(f"{url}/metrics", headers=headers)  # noqa: S310 - our own, over http
    try:
        with urllib.request.urlopen(asked) as answer:  # noqa: S310 - our own, over http
            assert b"stanchion_http_under_way" in answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code


def test_metrics_can_have_a_port_of_their_own(tmp_path: Path) -> None:
    key = "a-key-of-sixteen-or-more"
    with served(tmp_path, "--metrics-port", "0", STANCHION_ADMIN_KEY=key) as process:
        event = ready(process)
        assert scraped(event["url"]) == 401
        assert scraped(event["url"], key) == 200
        assert scraped(event["metrics"]) == 200
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=15)
        assert process.returncode == 0


def test_metrics_can_be_open_on_a_server_with_keys(tmp_path: Path) -> None:
    key = "a-key-of-sixteen-or-more"
    with served(tmp_path, "--metrics-open", STANCHION_ADMIN_KEY=key) as process:
        assert scraped(ready(process)["url"]) == 200


def test_a_person_sees_a_banner_and_ctrl_c_is_enough(tmp_path: Path) -> None:
    seen = on_terminal(
        *("serve", "--port", "0", "--store", "memory:", "--data-dir", str(tmp_path)),
        interrupt_when=lambda text: "admin_key" in text,
    )
    assert "Stanchion is ready. Ctrl-C stops it." in seen.text
    assert "  url        http://127.0.0.1:" in seen.text
    assert "  store      memory:" in seen.text
    assert seen.code == 0  # A server that drained did what it was told.
    assert "Traceback" not in seen.text


def test_on_a_busy_port_one_is_told_which_and_what_to_do(
    serving: subprocess.Popen[str], tmp_path: Path
) -> None:
    address = ready(serving)["url"].removeprefix("http://")
    port, folder = address.rpartition(":")[2], str(tmp_path / "other")
    second = subprocess.run(
        [sys.executable, "-m", "stanchion", "serve", "--port", port, "--data-dir", folder],
        env=plain_environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert second.returncode == Exit.FAILED
    event = json.loads(second.stderr)
    assert event["event"] == "server_refused"
    assert event["error"].startswith(f"cannot listen on {address}: Address already in use; ")
    assert "--port" in event["error"]


def test_strangers_are_not_let_in_without_a_key(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "stanchion", "serve"),
            *("--host", "192.0.2.1", "--port", "0", "--data-dir", str(tmp_path)),
        ],
        env=plain_environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == Exit.FAILED
    assert "STANCHION_ADMIN_KEY" in done.stderr


def test_the_data_directory_and_its_files_are_for_their_owner_only(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o755)
    (data / "stanchion.db").touch(mode=0o644)
    with served(data) as process:
        ready(process)
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in data.iterdir()}
    assert {"stanchion.db", "stanchion.db-wal", "stanchion.db-shm"} <= modes.keys()
    assert set(modes.values()) == {0o600}, modes
    assert stat.S_IMODE(data.stat().st_mode) == 0o700


def test_a_directory_with_files_of_others_keeps_its_mode(tmp_path: Path) -> None:
    data = tmp_path / "shared"
    data.mkdir(mode=0o755)
    (data / "notes.txt").touch()
    with served(data) as process:
        assert process.stderr is not None
        assert json.loads(process.stderr.readline())["event"] == "data_dir_not_private"
    assert stat.S_IMODE(data.stat().st_mode) == 0o755


def test_what_only_begins_with_the_name_of_the_database_keeps_its_mode(tmp_path: Path) -> None:
    """0600 closes a directory, and a file of another program may be for others to read."""
    (tmp_path / "stanchion-source").mkdir(mode=0o755)
    (tmp_path / "stanchion.md").touch(mode=0o644)
    for name in ("stanchion", "stanchion-wal"):
        (tmp_path / name).touch(mode=0o644)
    data = str(tmp_path / "data")
    with served(tmp_path, "--store", "sqlite:stanchion", "--data-dir", data) as process:
        ready(process)
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert (modes["stanchion-source"], modes["stanchion.md"]) == (0o755, 0o644)
    assert (modes["stanchion"], modes["stanchion-wal"]) == (0o600, 0o600)


def test_a_directory_beside_the_database_stays_open(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "stanchion.db.backups").mkdir(mode=0o755, parents=True)
    with served(data) as process:
        ready(process)
    assert stat.S_IMODE((data / "stanchion.db.backups").stat().st_mode) == 0o755
    assert stat.S_IMODE(data.stat().st_mode) == 0o700
