"""Settings are the same on every replica within two seconds, and hold while the store is away."""

from __future__ import annotations

import asyncio
import logging

import pytest
from prometheus_client import CollectorRegistry

from stanchion.adapters.store.memory import MemoryStore
from stanchion.core.escalation import Announcement, Order
from stanchion.core.faults import Fault as SettingsFault
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.lease import OnLockError, policy_for
from stanchion.core.model import Risk, RunId
from stanchion.core.retry import Fixed
from stanchion.core.settings import DEFAULTS, Settings, Strategy, settings_document
from stanchion.ports.bus import Bell
from stanchion.ports.errors import BackendError, BackendUnavailable
from stanchion.services.escalation import EscalationService
from stanchion.services.leasing import LeaseRefused, Leasing
from stanchion.services.renewal import Lease
from stanchion.services.settings import SettingsService
from stanchion.sim.loop import LoopClock
from tests.services.faulty_locks import Fault, FaultyLocks
from tests.services.faulty_store import FaultyStore
from tests.services.gatehouse import Bells, never
from tests.services.seeded import SeededEntropy
from tests.services.virtual import in_virtual_time

LOCKED: JsonObject = {"admission": {"strategy": "lock"}}


class Replica:
    """A replica that acts by the settings: it holds run leases, and it escalates."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        self.store = FaultyStore(fleet.store)
        self.registry = CollectorRegistry()
        self.keeper = SettingsService(
            self.store.port, clock=fleet.clock, bells=fleet.bells, registry=self.registry
        )
        self.locks = FaultyLocks(fleet.clock)
        self.leasing = Leasing(self.locks, clock=fleet.clock, entropy=SeededEntropy(number))
        self.escalating = EscalationService(
            f"replica-{number}",
            settings=lambda: self.keeper.current.escalation,
            documents=self.store.port,
            clock=fleet.clock,
            announce=self._announce,
            registry=self.registry,
        )
        self.tasks = [
            asyncio.create_task(self.keeper.run()),
            asyncio.create_task(self.escalating.run()),
        ]

    async def _announce(self, said: Announcement) -> None:
        del said

    def strategy(self) -> Strategy:
        return self.keeper.current.admission.strategy

    async def goes_on_without_locks(self, risk: Risk) -> bool:
        """Whether work of this class is done while the lock store is away."""
        self.locks.always(Fault.ERROR, "acquire", "ping")
        policy = policy_for(risk, self.keeper.current.policies)
        name, escalated = f"run/{RunId('1')}", self.escalating.closes(risk)
        async with self.leasing.hold(name, risk=risk, policy=policy, escalated=escalated) as held:
            assert isinstance(held, Lease | LeaseRefused)
            return isinstance(held, Lease)

    def metric(self, name: str) -> float | None:
        return self.registry.get_sample_value(f"stanchion_settings_{name}")


class Fleet:
    """Replicas over one store. Their bells may be lost."""

    def __init__(self) -> None:
        self.clock = LoopClock()
        self.store = MemoryStore(self.clock)
        self.bells = Bells()
        self.replicas: list[Replica] = []

    def add(self) -> Replica:
        replica = Replica(self, len(self.replicas))
        self.replicas.append(replica)
        return replica


virtual = in_virtual_time(Fleet)


def events(caplog: pytest.LogCaptureFixture, name: str) -> list[JsonValue]:
    return [vars(line)["fields"] for line in caplog.records if line.getMessage() == name]


# ── Changing them ────────────────────────────────────────────────────────────────────────────────


@virtual
async def test_a_patch_is_in_force_here_when_it_is_answered(fleet: Fleet) -> None:
    replica = fleet.add()
    assert replica.keeper.current == DEFAULTS
    answer = await replica.keeper.patch(LOCKED, actor="reviewer")
    assert isinstance(answer, Settings)
    assert replica.keeper.current == answer
    assert replica.strategy() is Strategy.LOCK
    assert replica.keeper.document() == settings_document(answer)
    assert fleet.bells.rung == [(Bell.SETTINGS, "")]


@virtual
async def test_the_bell_brings_a_change_to_the_others_at_once(fleet: Fleet) -> None:
    one, two = fleet.add(), fleet.add()
    await asyncio.sleep(0.3)
    await one.keeper.patch(LOCKED, actor="reviewer")
    await asyncio.sleep(0.01)
    assert two.strategy() is Strategy.LOCK


@virtual
async def test_without_a_bell_a_change_is_everywhere_within_two_seconds(fleet: Fleet) -> None:
    fleet.bells.is_mute = True
    one, two = fleet.add(), fleet.add()
    await asyncio.sleep(0.3)
    await one.keeper.patch(LOCKED, actor="reviewer")
    assert two.strategy() is Strategy.ATOMIC
    await asyncio.sleep(2)
    assert two.strategy() is Strategy.LOCK


@virtual
async def test_a_bad_patch_changes_nothing_and_says_what_is_wrong(fleet: Fleet) -> None:
    replica = fleet.add()
    faults = await replica.keeper.patch({"admission": {"strategy": "hope"}}, actor="reviewer")
    assert isinstance(faults, tuple)
    assert [(type(fault), fault.path) for fault in faults] == [
        (SettingsFault, "admission.strategy")
    ]
    assert replica.keeper.current == DEFAULTS
    assert await fleet.store.document("settings", "current") is None
    assert fleet.bells.rung == []


@virtual
async def test_of_patches_at_once_none_is_lost(fleet: Fleet) -> None:
    replicas = [fleet.add() for _ in range(4)]
    await asyncio.gather(
        *(
            replica.keeper.patch({"policies": {risk: {"renewal_failures_max": 9}}}, actor=risk)
            for replica, risk in zip(replicas, Risk, strict=True)
        )
    )
    await asyncio.sleep(1.1)
    for replica in replicas:
        policies = replica.keeper.current.policies
        assert [policies[risk].renewal_failures_max for risk in Risk] == [9] * 4


@virtual
async def test_a_race_that_never_ends_is_given_up(fleet: Fleet) -> None:
    replica = fleet.add()
    other = fleet.add().keeper
    waits = iter(range(1, 1_000))

    async def overtake() -> None:
        change: JsonObject = {"admission": {"lock_wait_s": next(waits) / 100}}
        await other.patch(change, actor="second")

    replica.store.script("put_document", *[overtake] * 100)
    with pytest.raises(BackendUnavailable, match="10 times in a row"):
        await replica.keeper.patch(LOCKED, actor="first")


@virtual
async def test_a_patch_that_changes_nothing_writes_nothing(fleet: Fleet) -> None:
    replica = fleet.add()
    await replica.keeper.patch(LOCKED, actor="reviewer")
    written = await fleet.store.document("settings", "current")
    assert await replica.keeper.patch(LOCKED, actor="reviewer") == replica.keeper.current
    assert await replica.keeper.patch({}, actor="reviewer") == replica.keeper.current
    assert await fleet.store.document("settings", "current") == written
    assert len(fleet.bells.rung) == 1


@virtual
async def test_a_patch_that_another_replica_has_made_already_is_in_force_at_once(
    fleet: Fleet,
) -> None:
    fleet.bells.is_mute = True
    one, two = fleet.add(), fleet.add()
    await asyncio.sleep(0.3)
    answer = await one.keeper.patch(LOCKED, actor="reviewer")
    assert two.strategy() is Strategy.ATOMIC
    assert await two.keeper.patch(LOCKED, actor="reviewer") == answer
    assert (two.strategy(), two.keeper.revision) == (Strategy.LOCK, one.keeper.revision)


@virtual
async def test_a_patch_goes_by_what_is_stored_not_by_what_was_last_read(fleet: Fleet) -> None:
    fleet.bells.is_mute = True
    one, two = fleet.add(), fleet.add()
    await asyncio.sleep(0.3)
    await one.keeper.patch(LOCKED, actor="first")
    await two.keeper.patch({"admission": {"lock_wait_s": 3}}, actor="second")
    admission = two.keeper.current.admission
    assert (admission.strategy, admission.lock_wait_s) == (Strategy.LOCK, 3)


@virtual
async def test_a_look_that_was_under_way_does_not_undo_a_patch(fleet: Fleet) -> None:
    stale = FaultyStore(fleet.store)
    stale.each_way_s = 0.2  # the answer travels while the patch is made
    keeper = SettingsService(
        stale.port, clock=fleet.clock, bells=fleet.bells, registry=CollectorRegistry()
    )
    looking = asyncio.create_task(keeper.look())
    await asyncio.sleep(0.3)  # read by now, and on its way back
    stale.each_way_s = 0
    await keeper.patch(LOCKED, actor="reviewer")
    await looking
    assert keeper.current.admission.strategy is Strategy.LOCK


@virtual
async def test_who_changed_what_is_logged_and_counted_on_every_replica(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    one, two = fleet.add(), fleet.add()
    await one.keeper.patch(
        {"admission": {"strategy": "lock"}, "lock_busy": {"kind": "fixed"}}, actor="reviewer"
    )
    await asyncio.sleep(1.5)
    assert two.keeper.current.lock_busy.retry == Fixed(500, 200)
    line = {
        "actor": "reviewer",
        "revision": 1,
        "changed": ["admission.strategy", "lock_busy.kind"],
    }
    assert events(caplog, "settings_changed") == [line, line]
    assert (one.metric("changes_total"), two.metric("changes_total")) == (1, 1)


# ── Bad days ─────────────────────────────────────────────────────────────────────────────────────


@virtual
async def test_while_the_store_is_away_the_last_values_hold(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fleet.bells.is_mute = True
    one, two = fleet.add(), fleet.add()
    await one.keeper.patch(LOCKED, actor="reviewer")
    await asyncio.sleep(1.5)
    two.store.away()
    await asyncio.sleep(10)
    await one.keeper.patch({"admission": {"strategy": "atomic"}}, actor="reviewer")
    await asyncio.sleep(10)
    assert two.strategy() is Strategy.LOCK
    assert two.metric("stale") == 1
    assert len(events(caplog, "settings_unreadable")) == 1
    with pytest.raises(BackendError):
        await two.keeper.patch({}, actor="reviewer")
    two.store.back()
    await asyncio.sleep(2)
    assert two.strategy() is Strategy.ATOMIC
    assert two.metric("stale") == 0
    assert len(events(caplog, "settings_readable")) == 1


@virtual
async def test_a_store_that_hangs_does_not_hold_up_the_next_look(fleet: Fleet) -> None:
    fleet.bells.is_mute = True
    one, two = fleet.add(), fleet.add()
    await asyncio.sleep(0.5)
    two.store.script("document", never)
    await one.keeper.patch(LOCKED, actor="reviewer")
    # The look that hangs began within a second, and was given up before the second one.
    await asyncio.sleep(3.1)
    assert two.strategy() is Strategy.LOCK


@pytest.mark.parametrize(
    "value",
    [
        "nonsense",
        {"settings": {}, "actor": "reviewer"},
        {"settings": {"admission": {"strategy": "hope"}}, "actor": "reviewer", "at": 0},
    ],
)
@virtual
async def test_what_cannot_be_read_leaves_the_last_good_values_and_can_be_mended(
    fleet: Fleet, caplog: pytest.LogCaptureFixture, value: JsonValue
) -> None:
    replica = fleet.add()
    await replica.keeper.patch(LOCKED, actor="reviewer")
    await fleet.store.put_document("settings", "current", value, read=None)
    await asyncio.sleep(5)
    assert replica.strategy() is Strategy.LOCK
    (line,) = events(caplog, "settings_invalid")
    assert isinstance(line, dict)
    assert line["revision"] == 2
    assert line["faults"]
    assert caplog.records[-1].levelname == "ERROR"
    assert replica.metric("invalid_total") == 1
    await replica.keeper.patch({"admission": {"lock_wait_s": 3}}, actor="reviewer")
    admission = replica.keeper.current.admission
    assert (admission.strategy, admission.lock_wait_s) == (Strategy.LOCK, 3)
    fresh = fleet.add()
    await fresh.keeper.look()
    assert fresh.keeper.current == replica.keeper.current


@virtual
async def test_a_store_that_lost_its_last_writes_is_right_all_the_same(fleet: Fleet) -> None:
    replica = fleet.add()
    await replica.keeper.patch(LOCKED, actor="reviewer")
    await asyncio.sleep(0.1)  # the bell was heard, and the next look is a while away
    await fleet.store.delete_document("settings", "current")
    other = fleet.add()
    await other.keeper.patch({"admission": {"lock_wait_s": 3}}, actor="reviewer")
    fleet.bells.is_mute = True
    await asyncio.sleep(2)  # the revision is 1 again
    assert replica.keeper.current == other.keeper.current
    await fleet.store.delete_document("settings", "current")
    await asyncio.sleep(2)
    assert replica.keeper.current == DEFAULTS


@virtual
async def test_it_stops_listening_when_it_is_cancelled(fleet: Fleet) -> None:
    replica = fleet.add()
    await asyncio.sleep(0.1)
    assert fleet.bells.listening == 1
    for task in replica.tasks:
        task.cancel()
    await asyncio.gather(*replica.tasks, return_exceptions=True)
    assert fleet.bells.listening == 0
    calls = replica.store.calls["document"]
    await asyncio.sleep(5)
    assert replica.store.calls["document"] == calls


# ── What goes by them ────────────────────────────────────────────────────────────────────────────


@virtual
async def test_policies_changed_at_run_time_are_obeyed_everywhere_within_two_seconds(
    fleet: Fleet,
) -> None:
    fleet.bells.is_mute = True
    replicas = [fleet.add(), fleet.add()]
    for replica in replicas:
        assert await replica.goes_on_without_locks(Risk.LOW)
    await replicas[0].keeper.patch(
        {"policies": {"low": {"on_lock_error": "fail_closed"}}}, actor="reviewer"
    )
    assert not await replicas[0].goes_on_without_locks(Risk.LOW)
    await asyncio.sleep(2)
    assert not await replicas[1].goes_on_without_locks(Risk.LOW)
    assert await replicas[1].goes_on_without_locks(Risk.STANDARD)
    # The store falls silent: what was chosen goes on.
    for replica in replicas:
        replica.store.away()
    await asyncio.sleep(60)
    for replica in replicas:
        assert not await replica.goes_on_without_locks(Risk.LOW)
        assert replica.keeper.current.policies[Risk.LOW].on_lock_error is OnLockError.FAIL_CLOSED


@virtual
async def test_what_escalation_closes_is_changed_at_run_time(fleet: Fleet) -> None:
    fleet.bells.is_mute = True
    one, two = fleet.add(), fleet.add()
    await one.escalating.order(Order.FORCE_CLOSED, actor="reviewer")
    await asyncio.sleep(2.5)
    assert [await each.goes_on_without_locks(Risk.STANDARD) for each in (one, two)] == [False] * 2
    await one.keeper.patch({"escalation": {"closes": ["low"]}}, actor="reviewer")
    await asyncio.sleep(2)
    assert [await each.goes_on_without_locks(Risk.STANDARD) for each in (one, two)] == [True] * 2
    assert [await each.goes_on_without_locks(Risk.LOW) for each in (one, two)] == [False] * 2


@pytest.mark.parametrize("is_store_away", [False, True])
@virtual
async def test_thresholds_of_escalation_are_changed_at_run_time(
    fleet: Fleet, is_store_away: bool
) -> None:
    fleet.bells.is_mute = True
    one, two = fleet.add(), fleet.add()

    async def trouble(seconds: int) -> None:
        for _ in range(seconds):
            for replica in (one, two):
                replica.escalating.count(fallbacks=1, duplicates=1)
            await asyncio.sleep(1)

    await trouble(60)
    assert not two.escalating.closes(Risk.HIGH)  # the window is five minutes
    await one.keeper.patch({"escalation": {"window_s": 20}}, actor="reviewer")
    await asyncio.sleep(2)
    if is_store_away:
        two.store.away()
    await trouble(40)
    assert two.escalating.closes(Risk.HIGH)
