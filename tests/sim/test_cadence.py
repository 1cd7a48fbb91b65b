"""How soon and how often: each rule says what is wrong, and nothing when nothing is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from random import Random
from typing import Any

from msgspec.structs import replace

from stanchion.core.model import Instant, JobId, RunId, Stamp, TenantId, Topic
from stanchion.core.topic_limits import TokenGrant, TokenPool
from stanchion.ports.bus import Bell
from stanchion.ports.locks import Granted, Renewed
from stanchion.ports.records import JobLease
from stanchion.services.gate_answers import GateCode, GateFailed, GateFull
from stanchion.sim import cadence, renewals
from stanchion.sim import invariants as must
from stanchion.sim.cadence import CadenceRecord
from stanchion.sim.history import History
from stanchion.sim.loop import LoopClock, Process, VirtualLoop
from stanchion.sim.network import CLEAR, SimLink
from stanchion.sim.renewals import RenewalRecord
from stanchion.sim.servers import StoreServer

JOB = JobId("run:a@1")
TENANT = TenantId("acme")


def good(sentences: Iterable[str]) -> bool:
    return list(sentences) == []


def played(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    loop = VirtualLoop()
    try:
        loop.run_until_complete(main())
    finally:
        loop.dissolve()


class _Bench:
    """One replica, whose bells and calls are told to its record."""

    def __init__(self) -> None:
        self.history = History()
        self.process, server = Process("replica"), StoreServer(LoopClock())
        self.link = SimLink(self.process, server, Random(1), self.history.faults, CLEAR)
        self.leased = {(JOB, 1)}
        self.record = CadenceRecord(
            self.history,
            self.process,
            LoopClock(),
            self.link,
            hears_bells=True,
            is_leaving=lambda: False,
            is_leased=lambda job_id, fence: (job_id, fence) in self.leased,
        )

    @property
    def broken(self) -> list[str]:
        return [each.partition(":")[0] for each in self.history.broken]


# ── Rules ────────────────────────────────────────────────────────────────────────────────────────


def test_a_renewal_is_due_after_a_third_of_its_term_and_soon_after_a_failure() -> None:
    def said(waited_ms: float, *, is_retry: bool = False) -> bool:
        return good(
            renewals.renewed_on_time("it", waited_ms=waited_ms, ttl_ms=6_000, is_retry=is_retry)
        )

    assert said(2_000)
    assert not said(1_900)
    assert not said(2_100)
    assert said(250, is_retry=True)
    assert said(500, is_retry=True)
    assert not said(200, is_retry=True)
    assert not said(600, is_retry=True)


def test_an_attempt_is_not_early_and_leaves_out_no_lease_that_is_nearly_due() -> None:
    assert good(renewals.retried_on_time("it", at=100, earliest=100))
    assert not good(renewals.retried_on_time("it", at=99, earliest=100))
    assert good(renewals.not_left_out("it", due_in_ms=251, ttl_ms=6_000))
    assert not good(renewals.not_left_out("it", due_in_ms=250, ttl_ms=6_000))


def test_what_is_heard_is_acted_on_and_what_is_watched_is_polled() -> None:
    assert good(cadence.heeded("it", "a bell", late_s=0.1))
    assert not good(cadence.heeded("it", "a bell", late_s=0.2))
    assert good(cadence.is_polled("it", JOB, unasked_s=1.1))
    assert not good(cadence.is_polled("it", JOB, unasked_s=1.5))


def test_nothing_is_asked_early_or_twice() -> None:
    assert good(cadence.asked_when_open("it", "all/", early_s=0.0))
    assert not good(cadence.asked_when_open("it", "all/", early_s=0.1))
    assert good(cadence.named_once("it", "pool_uses", ["a", "b"]))
    assert not good(cadence.named_once("it", "pool_uses", ["a", "b", "a"]))


def test_a_conflict_is_tried_again_a_number_of_times() -> None:
    assert good(cadence.read_again("it", "run/1", conflicts=1, is_read=True))
    assert good(cadence.read_again("it", "run/1", conflicts=20, is_read=False))
    assert not good(cadence.read_again("it", "run/1", conflicts=1, is_read=False))


def test_retry_after_grows_with_an_outage() -> None:
    assert good(cadence.grows_with_outage("it", retry_after_ms=1_000, lasted_s=0))
    assert good(cadence.grows_with_outage("it", retry_after_ms=5_000, lasted_s=60))
    assert not good(cadence.grows_with_outage("it", retry_after_ms=1_500, lasted_s=8))


def test_retry_after_of_a_full_tenant_follows_the_ends_of_its_runs() -> None:
    def said(retry_after_ms: int, *, ahead: int = 0, since_end_ms: int = 0) -> bool:
        return good(
            cadence.full_says_when(
                "it",
                retry_after_ms=retry_after_ms,
                gap_ms=3_000,
                since_end_ms=since_end_ms,
                ahead=ahead,
            )
        )

    assert said(1_500)
    assert said(3_000)
    assert said(1_480)  # by a clock that is a hundredth slower
    assert said(3_040)
    assert not said(1_400)
    assert not said(3_100)
    assert said(9_000, ahead=2)
    assert said(8_000, since_end_ms=8_000)
    assert not said(30_100, ahead=100)


def test_a_change_raises_the_version_by_one() -> None:
    assert good(must.version_counts("run", before=Stamp(1, "a"), now=Stamp(2, "b")))
    assert not good(must.version_counts("run", before=Stamp(1, "a"), now=Stamp(3, "b")))


def test_a_busy_lock_names_no_later_end_than_its_last() -> None:
    now, ends = Instant(1_000), [Instant(2_000), Instant(3_000)]
    assert good(must.refusal_names_an_end("it", in_ms=2_000, ends=ends, now=now))
    assert not good(must.refusal_names_an_end("it", in_ms=2_001, ends=ends, now=now))
    assert not good(must.refusal_names_an_end("it", in_ms=-1, ends=ends, now=now))


def test_a_caller_asks_for_no_longer_than_it_waits() -> None:
    assert good(must.asks_no_longer_than_it_waits("it", 5.0, 5.0))
    assert not good(must.asks_no_longer_than_it_waits("it", 5.01, 5.0))
    assert not good(must.asks_no_longer_than_it_waits("it", 1.0, -1.0))


# ── Records ──────────────────────────────────────────────────────────────────────────────────────


def test_a_bell_for_a_job_that_a_worker_waits_for_is_followed_by_a_look() -> None:
    async def main() -> None:
        for after_s, broken in ((0.05, []), (0.5, ["bells are acted on at once"])):
            bench = _Bench()
            await asyncio.sleep(5)
            with bench.record.waits_for_jobs([Topic("plan")]):
                await asyncio.sleep(1)
                bench.record.heard(Bell.READY, "search")  # nobody waits for it
                await asyncio.sleep(1)
                bench.record.heard(Bell.READY, "plan")
                await asyncio.sleep(after_s)
                bench.record.executed("lease_jobs", ())
            assert bench.broken == broken

    played(main)


def test_a_bell_that_met_a_pause_or_a_fault_is_not_judged() -> None:
    async def main() -> None:
        for is_paused in (True, False):
            bench = _Bench()
            await asyncio.sleep(5)
            bench.record.heard(Bell.SETTINGS, "limits")
            if is_paused:
                bench.process.pause()
                bench.process.resume()
            else:
                bench.link.troubled_at_s["list_documents"] = asyncio.get_running_loop().time()
            await asyncio.sleep(1)
            bench.record.executed("list_documents", ("limit",))
            assert bench.broken == []

    played(main)


def test_a_bell_that_is_heard_while_the_store_is_paused_is_not_judged() -> None:
    async def main() -> None:
        bench = _Bench()
        await asyncio.sleep(5)
        bench.link.server.process.pause()
        bench.record.heard(Bell.SETTINGS, "limits")
        await asyncio.sleep(6)
        bench.link.server.process.resume()
        bench.record.executed("list_documents", ("limit",))
        assert bench.broken == []

    played(main)


def test_a_held_call_asks_about_each_lease_once_a_second() -> None:
    async def main() -> None:
        bench = _Bench()
        leases = [JobLease(JOB, 1)]
        await asyncio.sleep(5)
        with bench.record.watches(leases, {}):
            await asyncio.sleep(1)
            bench.record.executed("lost_leases", (leases,))
            await asyncio.sleep(1)
        assert bench.broken == []
        with bench.record.watches(leases, {JOB: "cancelled"}):
            await asyncio.sleep(2)
        assert bench.broken == []
        with bench.record.watches(leases, {}):
            await asyncio.sleep(2)
        assert bench.broken == ["watched leases are polled"]

    played(main)


def test_calls_that_watch_the_same_leases_are_told_apart() -> None:
    async def main() -> None:
        bench = _Bench()
        leases = [JobLease(JOB, 1)]
        first = bench.record.watches(leases, {JOB: "cancelled"})
        second = bench.record.watches(leases, {JOB: "cancelled"})
        first.__enter__()
        second.__enter__()
        second.__exit__(None, None, None)
        await asyncio.sleep(0.5)
        bench.record.executed("lost_leases", (leases,))
        first.__exit__(None, None, None)
        assert bench.broken == []

    played(main)


def test_a_replica_that_drains_answers_its_workers_unless_the_store_stood_still() -> None:
    async def main() -> None:
        for is_paused, broken in ((False, ["bells are acted on at once"]), (True, [])):
            bench = _Bench()
            store = bench.link.server.process
            with bench.record.waits_for_jobs([Topic("quick")]):
                await asyncio.sleep(0.1)
                if is_paused:
                    store.pause()
                since = bench.record.drains()
                await asyncio.sleep(0.1)
                bench.process.loop.resume(store)
                bench.record.drained(since)
            assert bench.broken == broken

    played(main)


def test_a_pool_without_a_token_is_asked_again_when_it_may_have_one() -> None:
    async def main() -> None:
        pool = TokenPool("all", None, 1, None)
        none = TokenGrant((), Instant(0), 1)
        for wait_s, bell, broken in (
            (0.5, None, ["nothing is asked again without cause"]),
            (0.5, pool.name, []),
            (1.0, None, []),
        ):
            bench = _Bench()
            with bench.record.looks_for_jobs():
                bench.record.takes_tokens(pool, ("one",))
                bench.record.took_tokens(pool, ("one",), none)
            await asyncio.sleep(wait_s)
            if bell is not None:
                bench.record.heard(Bell.ROOM, bell)
            with bench.record.looks_for_jobs():
                bench.record.takes_tokens(pool, ("two",))
            assert bench.broken == broken

    played(main)


def test_a_bell_may_be_heard_after_a_request_of_the_same_moment() -> None:
    async def main() -> None:
        pool, none = TokenPool("all", None, 1, None), TokenGrant((), Instant(0), 1)
        for waits_s, broken in ((0.0, []), (0.001, ["nothing is asked again without cause"])):
            bench = _Bench()
            bench.record.heard(Bell.ROOM, pool.name)
            await asyncio.sleep(waits_s)
            bench.record.takes_tokens(pool, ("one",))
            await asyncio.sleep(0.004)
            bench.record.took_tokens(pool, ("one",), none)
            with bench.record.looks_for_jobs():
                bench.record.takes_tokens(pool, ("two",))
            assert bench.broken == broken

    played(main)


def test_a_run_that_was_not_read_after_a_conflict_is_left_too_early() -> None:
    async def main() -> None:
        bench, run_id = _Bench(), RunId("run")
        bench.record.conflicted(run_id)
        bench.record.executed("load", (run_id,))
        bench.record.left("run/run", is_done=True)
        bench.record.conflicted(run_id)
        bench.record.left("run/run", is_done=False)
        assert bench.broken == []
        bench.record.conflicted(run_id)
        bench.record.left("run/run", is_done=True)
        assert bench.broken == ["a conflict is tried again"]

    played(main)


def test_a_call_that_is_put_off_is_deferred() -> None:
    async def main() -> None:
        bench = _Bench()
        bench.record.puts_off(RunId("one"))
        bench.record.deferred(RunId("one"))
        await asyncio.sleep(5)
        bench.record.puts_off(RunId("two"))
        await asyncio.sleep(5)
        assert bench.broken == []
        bench.record.puts_off(RunId("three"))
        assert bench.broken == ["calls are deferred"]

    played(main)


def test_the_callers_that_were_refused_since_the_last_end_are_counted() -> None:
    async def main() -> None:
        bench = _Bench()
        bench.record.gated(TENANT, GateFull(1, 1, 2_000))
        bench.record.gated(TENANT, GateFull(1, 1, 4_000))
        bench.record.ended(TENANT)
        bench.record.gated(TENANT, GateFull(1, 1, 2_000))
        assert bench.broken == []
        bench.record.ended(TENANT)
        bench.record.gated(TENANT, GateFull(1, 1, 4_000))
        assert bench.broken == ["delays within policy"]

    played(main)


def test_a_row_of_a_batch_may_be_refused_long_before_its_answer() -> None:
    def answered(ms: int, *, row: object, is_raised: bool = False) -> list[str]:
        broken: list[str] = []

        async def main() -> None:
            bench = _Bench()
            with suppress(TimeoutError), bench.record.asks_gate(TENANT, 1) as asked_at:
                await asyncio.sleep(0.5)
                if is_raised:
                    raise TimeoutError
            if not is_raised:
                bench.record.gated(TENANT, row, batch_asked_at=asked_at)
            await asyncio.sleep(3)
            bench.record.ended(TENANT)
            bench.record.gated(TENANT, GateFull(1, 1, ms))
            broken.extend(bench.broken)

        played(main)
        return broken

    row, late = GateFull(1, 1, 2_000), ["delays within policy"]
    assert answered(3_500, row=row) == []
    assert answered(1_500, row=row) == []
    assert answered(3_600, row=row) == late
    assert answered(1_400, row=row) == late
    # A caller that left was perhaps not refused: then no gap is known.
    assert answered(1_000, row=row, is_raised=True) == []
    assert answered(3_600, row=row, is_raised=True) == late


def test_a_row_of_a_batch_may_fail_before_the_store_answers_another_start() -> None:
    def answered(ms: int, *, batch_asked_at: Instant | None) -> list[str]:
        broken: list[str] = []

        async def main() -> None:
            bench = _Bench()
            failed = GateFailed(GateCode.GATE_UNAVAILABLE, "away", 4_000)
            bench.record.gated(TENANT, failed, batch_asked_at=batch_asked_at)
            await asyncio.sleep(8)
            bench.record.gated(TENANT, replace(failed, retry_after_ms=ms))
            broken.extend(bench.broken)

        played(main)
        return broken

    assert answered(1_000, batch_asked_at=None) == ["delays within policy"]
    assert answered(1_000, batch_asked_at=Instant(0)) == []


def test_a_lock_is_renewed_at_its_time_until_its_hold_ends() -> None:
    async def main() -> None:
        for waits_s, broken in (
            ((1.0, 1.0), []),
            ((1.5, 1.0), ["leases are renewed at their time"]),
            ((1.0, 1.5), ["leases are renewed at their time"]),
        ):
            history, process = History(), Process("user")
            record = RenewalRecord(history)
            record.sends(process, "acquire", "name", "token")
            record.answered(process, "name", "token", Granted(1), 3_000)
            await asyncio.sleep(waits_s[0])
            record.sends(process, "renew", "name", "token")
            record.answered(process, "name", "token", Renewed(), 3_000)
            await asyncio.sleep(waits_s[1])
            record.ended(process, "name")
            assert [each.partition(":")[0] for each in history.broken] == broken

    played(main)


def test_a_gate_gives_its_lock_back() -> None:
    async def main() -> None:
        for is_released, broken in ((True, []), (False, ["what is held is given back"])):
            history, process = History(), Process("replica")
            record = RenewalRecord(history)
            record.sends(process, "acquire", "admission/acme", "token")
            record.answered(process, "admission/acme", "token", Granted(1), 10_000)
            if is_released:
                record.sends(process, "release", "admission/acme", "token")
            await asyncio.sleep(10)
            record.check_given_back(process.loop.now_s)
            assert [each.partition(":")[0] for each in history.broken] == broken

    played(main)
