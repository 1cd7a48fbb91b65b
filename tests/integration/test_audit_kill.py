"""kill -9 at every point of a change: afterwards there is the change and its entry, or neither.

A real server kills itself (``tests.integration.mortal``) at each point of a change: on SQLite
before each statement that writes, before the commit, and between the commit and the answer; on
Redis before, during and after each script. Then it is started again, and what can be seen of the
change over HTTP is compared with the audit log. Not in the table: starts have no entry; locks of an
embedded server live in its memory and end with it; ``drift.repair`` and ``upgrade.finish`` need a
store that is wrong or old (``tests/contract/test_audit.py``).
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import msgspec
import pytest

from stanchion.drills.processes import environment, free_port
from tests.gateway.test_audit import CHANGING
from tests.integration.mortal import Order
from tests.servers import running_nats, running_server

ADMIN_KEY: Final = "sk_admin_of-the-servers-that-are-killed-0123456789"
WAIT_S: Final = 20.0
POINTS_MAX: Final = 40
KILLED: Final = -9
ELSEWHERE: Final = frozenset({"audit_drift", "finish_upgrade"})
LOCKS: Final = frozenset({"hold_lease", "release_lease"})
SHARED: Final = frozenset(
    {"patch_settings", "set_escalation", "replay_dead_letter", "discard_dead_letter"}
)
"""Changes of what is not one tenant's alone: a later one changes it again."""


class Mortal:
    """A server that dies at a point of a change, and is started again on the same file."""

    def __init__(
        self, directory: Path, parent: subprocess.Popen[bytes], flags: Sequence[str]
    ) -> None:
        self._parent = parent
        self._port = free_port()
        self._armed = directory / "armed"
        own = ["--port", str(self._port), "--data-dir", str(directory / "data")]
        self._order = Order([*own, *flags], str(directory / "server.log"), str(self._armed))

    def start(self) -> None:
        """Start it, and wait until it answers."""
        assert self._parent.stdin is not None
        self._parent.stdin.write(msgspec.json.encode(self._order) + b"\n")
        self._parent.stdin.flush()

        until(self._answers, "the server does not start")

    def _answers(self) -> bool:
        try:
            return self.ask("GET", "/livez")[0] == http.HTTPStatus.OK
        except OSError:
            return False

    def ask(
        self, method: str, path: str, body: object = None, tenant: str | None = None
    ) -> tuple[int, Any]:
        """One request. Raises ``OSError`` if the server dies."""
        line = http.client.HTTPConnection("127.0.0.1", self._port, timeout=WAIT_S)
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        if tenant is not None:
            headers["X-Stanchion-Tenant"] = tenant
        try:
            line.request(method, path, None if body is None else json.dumps(body), headers)
            answer = line.getresponse()
            return answer.status, json.loads(answer.read() or b"null")
        except http.client.HTTPException as error:
            raise ConnectionError(*error.args) from error
        finally:
            line.close()

    def told(self, method: str, path: str, body: object = None, tenant: str | None = None) -> Any:  # noqa: ANN401 - any JSON
        """The answer to a request that succeeds."""
        status, answer = self.ask(method, path, body, tenant)
        assert status in {200, 202}, (method, path, status, answer)
        return answer

    def survives(
        self, change: str, point: int | str, request: tuple[str, str, object], of: str
    ) -> bool:
        """Make a change, and die at a point of it, if it has so many."""
        self._armed.write_text(f"{change} {point}")
        try:
            self.told(*request, tenant=of)
        except OSError:
            survived = False
        else:
            survived = True
        finally:
            self._armed.unlink()
        # It may die after the answer: what follows from a change has points, too.
        if survived and self._answers():
            return True
        assert self._parent.stdout is not None
        assert int(self._parent.stdout.readline()) == KILLED
        return False


def until(holds: Callable[[], object], otherwise: str) -> None:
    """Wait until it holds, at most for a while."""
    last = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < last, otherwise
        time.sleep(0.005)


@contextmanager
def mortal(directory: Path, *flags: str) -> Iterator[Mortal]:
    """A server, which is gone when the block ends."""
    settings = {"STANCHION_ADMIN_KEY": ADMIN_KEY, "STANCHION_JOB_LEASE_TTL_S": "0.5"}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.integration.mortal"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(settings) | {"PYTHONPATH": str(Path(__file__).parents[2])},
        start_new_session=True,
    ) as parent:
        try:
            server = Mortal(directory, parent, flags)
            server.start()
            yield server
        finally:
            os.killpg(parent.pid, 9)


# ── Changes: what each needs, what is sent, and what can be seen of it ────────────────────────────

ONE_STEP: Final = {"steps": {"only": {"topic": "work"}}}
ASKED: Final[dict[str, object]] = {"steps": {"ask": {"approval": {}}}}
DOOMED: Final = {"steps": {"a": {"topic": "doom"}}, "max_deliveries": 1}
LETTERS: Final = 80
DAILY: Final = {"workflow_id": "one", "every_s": 86_400}


class Case(NamedTuple):
    """A kind of change. The functions get a server, an own tenant, and what was prepared."""

    prepare: Callable[[Mortal, str], Any]
    request: Callable[[str, Any], tuple[str, str, object]]
    seen: Callable[[Mortal, str, Any], Any]
    of: str | None = None
    """The tenant that the request names, if it is another one."""


def _nothing(_server: Mortal, _tenant: str) -> None:
    return None


def _status(path: str) -> Callable[[Mortal, str, Any], Any]:
    """Whether the GET of a path finds something; ``{}`` is what was prepared."""
    return lambda server, tenant, known: server.ask("GET", path.format(known), tenant=tenant)[0]


def _put(path: str, body: object) -> Callable[[Mortal, str], Any]:
    def prepare(server: Mortal, tenant: str) -> None:
        _run(server, tenant, ONE_STEP)
        server.told("PUT", path.format(tenant), body, tenant)

    return prepare


def _run(server: Mortal, tenant: str, workflow: Mapping[str, object]) -> str:
    server.told("PUT", "/v1/workflows/one", workflow, tenant)
    return str(server.told("POST", "/v1/workflows/one/runs", {}, tenant)["run_id"])


def _ended(server: Mortal, tenant: str) -> str:
    run_id = _run(server, tenant, ONE_STEP)
    server.told("POST", f"/v1/runs/{run_id}/cancel", {}, tenant)
    return run_id


def _letter(server: Mortal, tenant: str) -> str:
    """A dead letter; they are made many at a time, because each waits for the end of a lease."""

    def listed() -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = server.told("GET", "/v1/admin/dead-letters?limit=1000")[
            "dead_letters"
        ]
        return rows

    if not listed():
        server.told("PUT", "/v1/admin/tenants/doomed", {"max_concurrent_runs": None})
        server.told("PUT", "/v1/workflows/one", DOOMED, "doomed")
        rows = {"runs": [{"key": f"{tenant}-{number}"} for number in range(LETTERS)]}
        server.told("POST", "/v1/workflows/one/runs/batch", rows, "doomed")
        worker = {"worker_id": "w", "topics": ["doom"], "max_jobs": 100}
        server.told("POST", "/v1/worker/lease", worker)
        until(lambda: len(listed()) >= LETTERS, "the jobs do not die")
    return str(listed()[0]["id"])


def _letters(server: Mortal, _tenant: str, known: str) -> bool:
    page = server.told("GET", "/v1/admin/dead-letters?limit=1000")
    return known in [each["id"] for each in page["dead_letters"]]


def _decision(verb: str) -> Case:
    return Case(
        lambda server, tenant: _run(server, tenant, ASKED),
        lambda _tenant, run_id: ("POST", f"/v1/runs/{run_id}/steps/ask/{verb}", {}),
        _run_status,
    )


def _run_status(server: Mortal, tenant: str, run_id: str) -> str:
    return str(server.told("GET", f"/v1/runs/{run_id}", tenant=tenant)["status"])


def _of_letter(verb: str) -> Case:
    return Case(
        _letter,
        lambda _tenant, letter: ("POST", f"/v1/admin/dead-letters/{quote(letter, '')}/{verb}", {}),
        _letters,
        of="doomed",
    )


def _keys(server: Mortal, tenant: str, _known: object) -> list[object]:
    rows = server.told("GET", "/v1/admin/keys?limit=1000")["keys"]
    return [each["revoked_at"] for each in rows if each["tenant"] == tenant]


def _new_key(server: Mortal, tenant: str) -> str:
    return str(server.told("POST", "/v1/admin/keys", {"role": "runner", "tenant": tenant})["id"])


SLOWLY: Final = {"action": "cancel", "filter": {"workflow_id": "one"}, "rate_per_s": 0.1}


def _bulk(server: Mortal, tenant: str) -> str:
    for _ in range(3):
        _run(server, tenant, ONE_STEP)
    return str(server.told("POST", "/v1/bulk", SLOWLY, tenant)["bulk_id"])


def _another(server: Mortal, _tenant: str) -> float:
    """Another wait budget than the present one."""
    now = server.told("GET", "/v1/admin/settings")["admission"]["lock_wait_s"]
    return 1.0 if now != 1.0 else 1.5


def _order(server: Mortal, _tenant: str) -> str:
    forced = server.told("GET", "/v1/admin/escalation")["forced"]
    return "force_open" if forced == "force_closed" else "force_closed"


def _locked(server: Mortal, tenant: str, _known: object) -> bool:
    rows = server.told("GET", "/v1/admin/leases?limit=1000")["leases"]
    return f"admission/{tenant}" in [each["name"] for each in rows]


CASES: Final[dict[str, Case]] = {
    "put_workflow": Case(
        _nothing,
        lambda _tenant, _known: ("PUT", "/v1/workflows/one", ONE_STEP),
        _status("/v1/workflows/one"),
    ),
    "put_shared_workflow": Case(
        lambda _server, tenant: tenant,
        lambda _tenant, known: ("PUT", f"/v1/shared/workflows/{known}", ONE_STEP),
        _status("/v1/shared/workflows/{}"),
    ),
    "put_schedule": Case(
        lambda server, tenant: _run(server, tenant, ONE_STEP),
        lambda _tenant, _known: ("PUT", "/v1/schedules/daily", DAILY),
        _status("/v1/schedules/daily"),
    ),
    "delete_schedule": Case(
        _put("/v1/schedules/daily", DAILY),
        lambda _tenant, _known: ("DELETE", "/v1/schedules/daily", None),
        _status("/v1/schedules/daily"),
    ),
    "put_limit": Case(
        lambda _server, tenant: tenant,
        lambda _tenant, known: (
            "PUT",
            f"/v1/admin/limits/{known}",
            {"topics": [f"{known}.*"], "max_running": 3},
        ),
        lambda server, tenant, _known: server.ask("GET", f"/v1/admin/limits/{tenant}")[0],
    ),
    "delete_limit": Case(
        lambda server, tenant: server.told(
            "PUT", f"/v1/admin/limits/{tenant}", {"topics": [f"{tenant}.*"], "max_running": 3}
        ),
        lambda tenant, _known: ("DELETE", f"/v1/admin/limits/{tenant}", None),
        lambda server, tenant, _known: server.ask("GET", f"/v1/admin/limits/{tenant}")[0],
    ),
    "put_tenant": Case(
        _nothing,
        lambda tenant, _known: ("PUT", f"/v1/admin/tenants/{tenant}", {"max_concurrent_runs": 7}),
        lambda server, tenant, _known: server.told("GET", f"/v1/admin/tenants/{tenant}"),
    ),
    "delete_tenant": Case(
        lambda server, tenant: server.told(
            "PUT", f"/v1/admin/tenants/{tenant}", {"max_concurrent_runs": 7}
        ),
        lambda tenant, _known: ("DELETE", f"/v1/admin/tenants/{tenant}", None),
        lambda server, tenant, _known: server.told("GET", f"/v1/admin/tenants/{tenant}"),
    ),
    "patch_settings": Case(
        _another,
        lambda _tenant, wait_s: (
            "PATCH",
            "/v1/admin/settings",
            {"admission": {"lock_wait_s": wait_s}},
        ),
        lambda server, _tenant, _known: server.told("GET", "/v1/admin/settings"),
    ),
    "create_key": Case(
        _nothing,
        lambda tenant, _known: ("POST", "/v1/admin/keys", {"role": "runner", "tenant": tenant}),
        _keys,
    ),
    "revoke_key": Case(
        _new_key, lambda _tenant, key_id: ("DELETE", f"/v1/admin/keys/{key_id}", None), _keys
    ),
    "set_escalation": Case(
        _order,
        lambda _tenant, order: ("POST", "/v1/admin/escalation", {"order": order}),
        lambda server, _tenant, _known: server.told("GET", "/v1/admin/escalation")["forced"],
    ),
    "cancel_run": Case(
        lambda server, tenant: _run(server, tenant, ONE_STEP),
        lambda _tenant, run_id: ("POST", f"/v1/runs/{run_id}/cancel", {}),
        _run_status,
    ),
    "rerun_run": Case(
        _ended,
        lambda _tenant, run_id: ("POST", f"/v1/runs/{run_id}/rerun", {}),
        lambda server, tenant, run_id: len(
            server.told("GET", f"/v1/runs?rerun_of={run_id}", tenant=tenant)["runs"]
        ),
    ),
    "approve_step": _decision("approve"),
    "reject_step": _decision("reject"),
    "replay_dead_letter": _of_letter("replay"),
    "discard_dead_letter": _of_letter("discard"),
    "hold_lease": Case(
        _nothing,
        lambda tenant, _known: (
            "POST",
            "/v1/admin/leases",
            {"name": f"admission/{tenant}", "ttl_s": 600},
        ),
        _locked,
    ),
    "release_lease": Case(
        lambda server, tenant: server.told(
            "POST", "/v1/admin/leases", {"name": f"admission/{tenant}", "ttl_s": 600}
        ),
        lambda tenant, _known: ("DELETE", f"/v1/admin/leases/admission/{tenant}", None),
        _locked,
    ),
    # Last: what they begin writes entries of its own.
    "start_bulk": Case(
        lambda server, tenant: _run(server, tenant, ONE_STEP),
        lambda _tenant, _known: ("POST", "/v1/bulk", SLOWLY),
        lambda server, tenant, _known: len(server.told("GET", "/v1/bulk", tenant=tenant)["bulks"]),
    ),
    "stop_bulk": Case(
        _bulk,
        lambda _tenant, bulk_id: ("DELETE", f"/v1/bulk/{bulk_id}", None),
        # Whether it was stopped: on a slow machine it ends by itself meanwhile.
        lambda server, tenant, bulk_id: (
            server.told("GET", f"/v1/bulk/{bulk_id}", tenant=tenant)["status"] == "stopped"
        ),
    ),
}


def test_every_kind_of_change_is_in_the_table() -> None:
    assert set(CASES) | ELSEWHERE == set(CHANGING)


def test_killed_before_and_after_a_commit_there_is_neither_or_both(tmp_path: Path) -> None:
    with mortal(tmp_path) as server:
        for name in ONE_OF_EACH_STEP:
            for point, is_done in (("commit", False), ("committed", True)):
                judged = _judge(server, name, point)
                assert (judged.survived, judged.is_done) == (False, is_done), name


ONE_OF_EACH_STEP: Final = (
    "put_tenant",
    "patch_settings",
    "cancel_run",
    "rerun_run",
)
"""One for each kind of store step that writes entries; `make chaos` has all, at every point."""


@pytest.mark.chaos
def test_killed_at_any_point_on_sqlite_there_is_the_change_and_its_entry_or_neither(
    tmp_path: Path,
) -> None:
    with mortal(tmp_path) as server:
        _judge_all(server, set(CASES) - LOCKS)


@pytest.mark.chaos
def test_killed_at_any_point_on_redis_there_is_the_change_and_its_entry_or_neither(
    tmp_path: Path,
) -> None:
    with (
        running_server() as valkey,
        running_nats() as nats,
        mortal(tmp_path, "--store", valkey.url, "--bus", nats.url) as server,
    ):
        _judge_all(server, set(CASES))


def _judge_all(server: Mortal, names: Container[str]) -> None:
    judged: list[Judged] = []
    for name in CASES:
        if name in names:
            for point in range(1, POINTS_MAX):
                judged.append(_judge(server, name, point))
                if judged[-1].survived:
                    break
            else:
                pytest.fail(f"{name} has more than {POINTS_MAX} points")
    for each in judged:
        # What was not done then was not done later either.
        if not each.is_done and each.name not in SHARED:
            assert CASES[each.name].seen(server, each.tenant, each.known) == each.before, each


class Judged(NamedTuple):
    """A change, and what became of it."""

    name: str
    tenant: str
    known: Any
    before: Any
    is_done: bool
    survived: bool


def _judge(server: Mortal, name: str, point: int | str) -> Judged:
    """Kill the server at a point of a change, and compare the change with the log."""
    case, action = CASES[name], CHANGING[name].audits
    tenant = f"{name}-{point}".replace("_", "-")
    known = case.prepare(server, tenant)
    before, entries = case.seen(server, tenant, known), _entries(server, action)
    survived = server.survives(name, point, case.request(tenant, known), case.of or tenant)
    if not survived:
        server.start()

    def agrees() -> bool:
        is_done = case.seen(server, tenant, known) != before
        return _entries(server, action) - entries == int(is_done)

    # A cancel that was recorded is applied, and the note of a lock moved, within a moment.
    until(agrees, f"{name}, killed at point {point}: a change without its entry, or one without it")
    is_done = case.seen(server, tenant, known) != before
    assert is_done or not survived, name
    return Judged(name, tenant, known, before, is_done, survived)


def _entries(server: Mortal, action: str | None) -> int:
    return len(server.told("GET", f"/v1/admin/audit?action={action}&limit=1000")["entries"])
