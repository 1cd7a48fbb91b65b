"""``module:app`` is found or the fix is named; with reload a changed file starts it anew."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from stanchion.worker import BadTarget, command
from stanchion.worker.command import REFUSED, USAGE, load_worker, run_worker, snapshot
from stanchion.worker.tasks import ThreadExecutor
from tests.worker.ledger import Fault, Ledger, serving
from tests.worker.test_processes import _now_ms

APP = """
from stanchion import Job, Worker

app = Worker()


@app.task("t")
async def handle(job: Job) -> str:
    return {version!r}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [each for each in sys.modules if each.startswith("some_")]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "some_worker.py").write_text(APP.format(version="one"))
    return tmp_path


@pytest.mark.parametrize("target", ["some_worker:app", "some_worker"])
def test_a_target_is_found_where_the_command_runs(project: Path, target: str) -> None:
    assert project == Path.cwd()
    assert load_worker(target).topics == ("t",)


@pytest.mark.parametrize(
    ("target", "fix"),
    [
        ("some_worker.py:app", "write it as some_worker:app"),
        ("some/place.py", "write it as some.place:app"),
        ("./some/place.py:other", "write it as some.place:other"),
        (".some_worker:app", "write it as some_worker:app"),
        ("", "write it as worker:app"),
        ("nowhere:app", "there is no module 'nowhere' here"),
        ("nowhere.below:app", "there is no module 'nowhere' here"),
        ("some_worker:worker", "is no worker; write some_worker:app"),
        ("json:app", "is no worker; make one with stanchion.Worker()"),
    ],
)
def test_a_target_that_names_no_worker_is_answered_with_the_fix(
    project: Path, target: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert project == Path.cwd()
    with pytest.raises(BadTarget) as raised:
        load_worker(target)
    assert fix in str(raised.value)
    assert run_worker(target) == USAGE
    assert capsys.readouterr().err == f"error: {raised.value}\n"


def test_an_error_inside_the_module_is_its_own(project: Path) -> None:
    (project / "some_bad.py").write_text("import not_there_at_all")
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        load_worker("some_bad:app")


@pytest.mark.parametrize("raised", ["RuntimeError", "ValueError"])
def test_an_error_inside_the_module_is_shown_from_its_line_on(
    project: Path, raised: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / f"raises_{raised}.py").write_text(f"x = 1\nraise {raised}('boom')")
    assert run_worker(f"raises_{raised}:app") == REFUSED
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "Traceback (most recent call last):"
    assert told[1].endswith(f'raises_{raised}.py", line 2, in <module>')
    assert told[-2] == f"{raised}: boom"
    assert told[-1] == f"error: the module of 'raises_{raised}:app' cannot be imported, see above"


@pytest.mark.usefixtures("project")
async def test_a_worker_that_is_refused_ends_with_a_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ledger = Ledger(_now_ms)
    ledger.always("lease", Fault.REFUSED)
    async with serving(ledger) as url:
        # In a thread there are no signals to take, and the loop here is the server's.
        code = await ThreadExecutor(1).call(run_worker, "some_worker:app", url)
    assert code == REFUSED
    assert (
        "said the script: forbidden (403 forbidden); give a worker's key" in capsys.readouterr().err
    )


def test_a_snapshot_sees_python_files_and_no_environments(project: Path) -> None:
    (project / "data.txt").write_text("x")
    for hidden in (".git", "node_modules", "venv"):
        (project / hidden).mkdir()
        (project / hidden / "a.py").write_text("")
    (project / "venv" / "pyvenv.cfg").write_text("")
    before = snapshot(project)
    assert [Path(path).name for path in before] == ["some_worker.py"]
    (project / "some_worker.py").write_text(APP.format(version="three"))
    assert snapshot(project) != before


async def test_a_changed_file_starts_the_worker_anew(project: Path) -> None:
    ledger = Ledger(_now_ms)
    script = textwrap.dedent("""
        import sys
        from stanchion.worker.command import run_worker
        sys.exit(run_worker("some_worker:app", sys.argv[1], reload=True))
    """)
    async with serving(ledger) as url:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, url, stderr=asyncio.subprocess.PIPE
        )
        assert process.stderr is not None
        try:
            ledger.put("run:1@1")
            await ledger.until(lambda: len(ledger.results) == 1)
            # A file that cannot be read stops it until the next change.
            (project / "some_worker.py").write_text("this is no Python")
            while b"SyntaxError" not in await asyncio.wait_for(process.stderr.readline(), 20):
                pass
            (project / "some_worker.py").write_text(APP.format(version="another"))
            ledger.put("run:2@1")
            await ledger.until(lambda: len(ledger.results) == 2)
            process.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(process.wait(), 20) == 0
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()
    assert ledger.results["run:1@1"].output == "one"
    assert ledger.results["run:2@1"].output == "another"


def test_a_signal_ends_the_wait_for_a_change_of_a_worker_that_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = itertools.count()

    def look(_root: Path) -> command.Snapshot:
        number = next(looks)
        assert number <= 1, "the signal was not heeded"
        if number == 1:
            signal.raise_signal(signal.SIGTERM)
        return {}

    monkeypatch.setattr(command, "snapshot", look)
    failing = [sys.executable, "-c", "raise SystemExit(3)"]
    assert command.reload_on_change(failing, b"", stop_s=10) in {3, -signal.SIGTERM}


async def test_threads_hand_back_what_happened_and_keep_the_context() -> None:
    threads = ThreadExecutor(2)

    def raises() -> None:
        raise StopIteration

    with pytest.raises(RuntimeError, match="StopIteration"):
        await threads.call(raises)
    names = {(await threads.call(threading.current_thread)).name for _ in range(5)}
    assert names == {"stanchion-worker-0"}
    barrier = threading.Barrier(2)
    await asyncio.gather(threads.call(barrier.wait, 5), threads.call(barrier.wait, 5))
    assert await threads.call(os.getpid) == os.getpid()
    threads.close()
