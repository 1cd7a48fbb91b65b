"""Cursors over HTTP: sealed, bound to their list and tenant, and worth nothing to a forger."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from urllib.parse import quote

import pytest

from stanchion.adapters.store.memory import MemoryStore
from stanchion.adapters.system import ManualClock, SystemEntropy
from stanchion.gateway.cursors import KEY_TRUSTED_MS, Cursors, CursorSeal
from stanchion.gateway.route import Route
from stanchion.gateway.routes import ROUTES
from stanchion.ports.records import BadCursor
from tests.gateway.house import ADMIN, House

LISTS = [route for route in ROUTES if "cursor" in getattr(route.query, "__struct_fields__", ())]
KINDS = {
    "list_runs": "runs",
    "list_schedules": "schedules",
    "list_bulks": "documents",
    "list_limits": "documents",
    "get_timeline": "timeline",
    "list_items": "items",
    "list_workflows": "workflows",
    "list_shared_workflows": "shared_workflows",
    "list_workflow_uses": "workflow_uses",
    "list_tenants": "tenants",
    "list_keys": "documents",
    "list_dead_letters": "dead-letters",
    "list_approvals": "approvals",
    "list_leases": "leases",
    "list_replicas": "replicas",
    "list_workers": "workers",
    "list_audit": "audit",
    "list_decisions": "receipts",
    "show_admission": "admission",
}
HUGE = ("9" * 30, str(2**63), str(2**64), "-1", "1.5", "1e400", "NaN", "null", "true", '"x"')


def forged(kind: str) -> Iterator[str]:
    """What a caller who knows a store's own cursors would send."""
    for member in HUGE:
        for text in (f'["{kind}",{member}]', f'["{kind}",{member},{member}]'):
            yield base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")
    yield from ("A", "AA", "A" * 64, "A" * 1024, "=", "-_-_")


def path_of(route: Route, run_id: str) -> str:
    path = route.path.replace("{run_id}", run_id).replace("{step_id}", "only")
    return path.replace("{workflow_id}", "one-step")


def test_every_list_is_known_here() -> None:
    assert {route.id for route in LISTS} == set(KINDS)


@pytest.mark.parametrize("route", LISTS, ids=lambda route: route.id)
async def test_a_forged_cursor_is_422(route: Route, house: House) -> None:
    path = path_of(route, await house.start())
    for cursor in forged(KINDS[route.id]):
        answer = await house.ask("GET", f"{path}?cursor={quote(cursor)}")
        assert (answer.status, answer.code) == (422, "invalid_request"), cursor
        assert answer.json["errors"][0]["path"] == "cursor"


async def test_a_forged_id_of_an_event_is_422(house: House) -> None:
    for given in forged("feed"):
        answer = await house.ask("GET", "/v1/events", headers=[("Last-Event-ID", given)])
        assert (answer.status, answer.code) == (422, "invalid_request"), given


async def test_a_cursor_is_good_for_its_own_list_and_tenant_only(guarded_house: House) -> None:
    house = guarded_house
    first, second = [await house.make_key("runner", tenant) for tenant in ("a", "b")]
    runs = [await house.start(key=first) for _ in range(2)]
    await house.start(key=second)

    async def cursor_of(path: str, key: str) -> str:
        return str((await house.ask("GET", f"{path}?limit=1", key=key)).json["cursor"])

    async def status(path: str, cursor: str, key: str) -> int:
        return (await house.ask("GET", f"{path}?cursor={cursor}", key=key)).status

    lines = [f"/v1/runs/{run_id}/timeline" for run_id in runs]
    of_runs, of_lines = await cursor_of("/v1/runs", first), await cursor_of(lines[0], first)
    assert await status("/v1/runs", of_runs, first) == 200
    assert await status("/v1/runs", of_runs, second) == 422
    assert await status("/v1/workflows", of_runs, first) == 422
    assert await status(lines[0], of_lines, first) == 200
    assert await status(lines[1], of_lines, first) == 422
    assert await status(lines[0], of_runs, first) == 422


async def test_a_tenants_admin_learns_nothing_of_other_keys_from_pages(
    guarded_house: House,
) -> None:
    house = guarded_house
    made = [await house.make_key("admin", "a" if each % 5 == 2 else "b") for each in range(20)]
    ids = [key.split("_")[1] for key in made]
    own, foreign = set(ids[2::5]), set(ids) - set(ids[2::5])
    pages: list[list[str]] = []
    cursor = ""
    while True:
        answer = await house.ask("GET", f"/v1/admin/keys?limit=1{cursor}", key=made[2])
        pages.append([each["id"] for each in answer.json["keys"]])
        if answer.json["cursor"] is None:
            break
        sealed = answer.json["cursor"]
        raw = base64.urlsafe_b64decode(sealed + "=" * (-len(sealed) % 4))
        assert not any(key_id.encode() in raw for key_id in foreign)
        cursor = f"&cursor={sealed}"
    # Neither empty pages nor a last cursor that leads to nothing: both would count foreign keys.
    assert sorted(pages) == [[key_id] for key_id in sorted(own)]
    everything = await house.ask("GET", "/v1/admin/keys?limit=100", key=ADMIN)
    assert [each["id"] for each in everything.json["keys"]] == sorted(ids)


async def test_pages_of_all_schedules_leave_none_out(house: House) -> None:
    # "-" and "." come before the "/" that stands between tenant and id.
    names = [(tenant, name) for tenant in ("a", "a-b", "a.b") for name in ("x", "y")]
    for tenant, name in names:
        await house.start(tenant=tenant)
        body = {"workflow_id": "one-step", "every_s": 3600}
        made = await house.ask("PUT", f"/v1/schedules/{name}", body, tenant=tenant)
        assert made.status == 200, made.body
    found, cursor = [], ""
    for _ in names:
        answer = await house.ask("GET", f"/v1/schedules?limit=1{cursor}", tenant="*")
        found += [(each["tenant"], each["id"]) for each in answer.json["schedules"]]
        cursor = f"&cursor={answer.json['cursor']}"
    assert found == names
    assert cursor == "&cursor=None"


# ── The seal ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("text", ["", "a", "x" * 31, "x" * 32, "x" * 33, "x" * 500])
def test_a_sealed_cursor_opens_and_no_changed_one_does(text: str) -> None:
    seal = CursorSeal("secret", ("runs", "acme"))
    sealed = seal.seal(text)
    assert seal.open(sealed) == text
    assert seal.seal(text) == sealed  # the id of an event does not change from stream to stream
    assert len(sealed) <= 1024
    changed = [
        f"{sealed[:at]}{'A' if sealed[at] != 'A' else 'B'}{sealed[at + 1 :]}"
        for at in range(len(sealed))
    ]
    for wrong in (*changed, sealed[:-1], sealed[1:], sealed + "A", sealed + "=", sealed + "\n"):
        with pytest.raises(BadCursor):
            seal.open(wrong)


def test_a_cursor_opens_under_its_own_secret_and_context_only() -> None:
    sealed = CursorSeal("secret", ("runs", "acme")).seal("x")
    others = [("other", ("runs", "acme")), ("secret", ("runs", "acm")), ("secret", ("runsacme",))]
    for secret, context in others:
        with pytest.raises(BadCursor):
            CursorSeal(secret, context).open(sealed)


def test_the_length_of_a_cursor_does_not_tell_the_length_of_its_text() -> None:
    seal = CursorSeal("secret", ("runs",))
    assert len({len(seal.seal("x" * size)) for size in range(1, 33)}) == 1


class Replicas:
    """Two replicas on one store, with a clock that tests set."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(self.clock)
        self.first, self.second = self.another(), self.another()

    def another(self) -> Cursors:
        return Cursors(self.store, SystemEntropy(), self.clock)


async def test_replicas_agree_and_a_restart_changes_nothing() -> None:
    two = Replicas()
    sealed = (await two.first.of("runs", "acme")).seal("x")
    assert await two.second.open(sealed, "runs", "acme") == "x"
    assert await two.another().open(sealed, "runs", "acme") == "x"


async def test_a_key_that_a_failover_lost_is_replaced_on_every_replica() -> None:
    two = Replicas()
    await two.first.of("runs")
    await two.store.delete_document("secret", "cursors")
    sealed = (await two.second.of("runs")).seal("x")
    assert await two.first.open(sealed, "runs") == "x"


async def test_no_cursor_is_sealed_with_a_lost_key_for_long() -> None:
    two = Replicas()
    await two.first.of("runs")
    await two.store.delete_document("secret", "cursors")
    await two.second.of("runs")  # creates another key
    two.clock.advance(KEY_TRUSTED_MS)
    sealed = (await two.first.of("runs")).seal("x")
    assert await two.second.open(sealed, "runs") == "x"


async def test_a_lost_key_is_written_back_by_a_replica_that_knows_it() -> None:
    two = Replicas()
    sealed = (await two.first.of("runs")).seal("x")
    await two.store.delete_document("secret", "cursors")
    two.clock.advance(KEY_TRUSTED_MS)
    await two.first.of("runs")
    assert await two.second.open(sealed, "runs") == "x"
