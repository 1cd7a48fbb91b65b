"""Each invariant says what is wrong, and nothing when nothing is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from msgspec import structs

from stanchion.adapters.store.memory.state import JobFile, MemoryState, RunFile
from stanchion.adapters.system import ManualClock
from stanchion.client.signals import Retrying
from stanchion.core.events import CancelRequested, Timer, TimerKind
from stanchion.core.model import (
    Failure,
    Instant,
    Job,
    JobId,
    OnJob,
    Run,
    RunId,
    RunStatus,
    Stamp,
    Step,
    StepId,
    StepStatus,
    TenantId,
    Topic,
    WorkflowId,
)
from stanchion.core.retry import RETRIES, Budget, Fixed, RetryClass
from stanchion.core.settings import DEFAULTS, AdmissionSettings, LockBusy, Settings
from stanchion.core.topic_limits import LimitScope, TopicLimit
from stanchion.core.transition import TimelineEntry, Transition
from stanchion.core.why import Blocker, Finding, RunFacts, WhyCode
from stanchion.ports.records import JobState
from stanchion.sim import invariants as must
from stanchion.sim import shown

NOW = Instant(1_000_000)
RUN = RunId("run")
JOB = JobId("run:a@1")


def good(sentences: Iterable[str]) -> bool:
    return list(sentences) == []


def shelf_with(run: Run | None = None) -> tuple[MemoryState, RunFile]:
    state = MemoryState(ManualClock(NOW), 1_000, 1_000)
    file = RunFile(run or a_run(), None)
    state.runs[RUN] = file
    return state, file


def a_run(status: RunStatus = RunStatus.RUNNING, **steps: Step) -> Run:
    return Run(
        id=RUN,
        tenant=TenantId("acme"),
        workflow_id=WorkflowId("three"),
        workflow_version=1,
        input={},
        created_at=NOW,
        status=status,
        steps={StepId(name): step for name, step in steps.items()},
    )


def a_job(**members: object) -> JobFile:
    job = Job(
        id=JOB,
        run_id=RUN,
        tenant=TenantId("acme"),
        step_id=StepId("a"),
        topic=Topic("plan"),
        attempt=1,
        input={},
    )
    return replace(JobFile(job), **members)  # type: ignore[arg-type]  # members by name


def test_a_cap_holds_up_to_its_number() -> None:
    assert good(must.cap_holds("acme", 2, 2))
    assert good(must.cap_holds("acme", 200, None))
    assert not good(must.cap_holds("acme", 3, 2))


def test_a_topic_limit_counts_its_topics_and_each_tenant_by_itself() -> None:
    shared = TopicLimit(id="all", topics=("llm.*",), max_running=2)
    each = TopicLimit(id="each", topics=("llm.*",), per=LimitScope.TENANT, max_running=1)
    jobs = [
        Job(
            id=JobId(f"run:{tenant}-{topic}@1"),
            run_id=RunId("run"),
            tenant=TenantId(tenant),
            step_id=StepId("s"),
            topic=Topic(topic),
            attempt=1,
            input=None,
        )
        for tenant, topic in (("a", "llm.x"), ("b", "llm.y"), ("b", "mail"), ("b", "llm.z"))
    ]
    assert list(must.topic_limits_hold([shared, each], jobs[:3])) == []
    told = list(must.topic_limits_hold([shared, each], jobs))
    assert [line.partition(":")[0] for line in told] == ["limit all/", "limit each/b"]


def test_slots_are_neither_more_nor_fewer_than_unfinished_runs() -> None:
    assert good(must.slots_are_unfinished_runs("acme", 2, 2))
    assert not good(must.slots_are_unfinished_runs("acme", 3, 2))
    assert not good(must.slots_are_unfinished_runs("acme", 1, 2))


def test_a_key_has_one_run() -> None:
    assert good(must.one_run_per_key(("acme", "key"), ["one"]))
    assert not good(must.one_run_per_key(("acme", "key"), ["one", "two"]))


def test_only_what_changed_too_late_is_wrong() -> None:
    assert good(must.nothing_after_deadline("it", is_late=True, has_changed=False))
    assert good(must.nothing_after_deadline("it", is_late=False, has_changed=True))
    assert not good(must.nothing_after_deadline("it", is_late=True, has_changed=True))


def test_the_gate_has_its_budget_and_half_a_second() -> None:
    settings = [Settings(admission=AdmissionSettings(lock_wait_s=2))]
    assert good(must.gate_answers_in_time(2.5, settings))
    assert not good(must.gate_answers_in_time(2.51, settings))


def test_a_chain_compares_version_and_nonce() -> None:
    present = Stamp(2, "one")
    assert good(must.chain_holds("run", read=Stamp(2, "one"), present=present))
    assert not good(must.chain_holds("run", read=Stamp(2, "two"), present=present))
    assert not good(must.chain_holds("run", read=Stamp(1, "one"), present=present))


def test_fences_rise() -> None:
    assert good(must.fence_rises("run", before=1, now=1))
    assert good(must.fence_rises("run", before=1, now=2, strictly=True))
    assert not good(must.fence_rises("run", before=2, now=1))
    assert not good(must.fence_rises("run", before=1, now=1, strictly=True))


def test_a_finished_run_does_not_change() -> None:
    assert good(must.finished_is_absorbing("run", was_finished=False))
    assert not good(must.finished_is_absorbing("run", was_finished=True))


def test_closed_classes_do_not_work_unleased() -> None:
    assert good(must.unleased_only_by_policy("run", must_close=False))
    assert not good(must.unleased_only_by_policy("run", must_close=True))


def test_an_inbox_needs_a_row() -> None:
    state, file = shelf_with()
    assert good(must.inbox_has_row(state, RUN))
    file.inbox["one"] = CancelRequested()
    assert not good(must.inbox_has_row(state, RUN))
    state.outbox.put(RUN, NOW)
    assert good(must.inbox_has_row(state, RUN))


def test_grants_do_not_overlap() -> None:
    assert good(must.grant_is_disjoint("run", until=None, now=NOW))
    assert good(must.grant_is_disjoint("run", until=NOW, now=NOW))
    assert not good(must.grant_is_disjoint("run", until=Instant(NOW + 1), now=NOW))


def test_who_trusts_a_lease_owns_it() -> None:
    assert good(must.holder_owns("run", fence=5, owner=5))
    assert not good(must.holder_owns("run", fence=5, owner=6))
    assert not good(must.holder_owns("run", fence=5, owner=None))


@pytest.mark.parametrize(
    ("file", "is_good"),
    [
        (a_job(state=JobState.LEASED, fence=5, expires_at=Instant(NOW + 1)), True),
        (a_job(state=JobState.LEASED, fence=5, expires_at=NOW), False),
        (a_job(state=JobState.LEASED, fence=6, expires_at=Instant(NOW + 1)), False),
        (a_job(state=JobState.READY, fence=5), False),
        (a_job(state=JobState.DEAD, fence=5), False),
        (a_job(state=JobState.REVOKED, fence=5), True),
        (a_job(state=JobState.FINISHED, fence=6), False),
        (None, False),
    ],
)
def test_a_worker_that_trusts_its_lease_has_the_job(file: JobFile | None, is_good: bool) -> None:
    assert good(must.job_holder_owns(JOB, 5, file, NOW)) is is_good


def test_a_result_is_taken_once_and_from_its_holder() -> None:
    assert good(must.settle_overtakes_nothing(RUN, []))
    assert not good(must.settle_overtakes_nothing(RUN, ["cancel"]))
    assert good(must.accepted_once(JOB, fence=5, holder=5, before=0))
    assert not good(must.accepted_once(JOB, fence=5, holder=5, before=1))
    assert not good(must.accepted_once(JOB, fence=5, holder=6, before=0))
    assert not good(must.accepted_once(JOB, fence=5, holder=None, before=0))


def test_what_was_told_stays_true() -> None:
    assert good(must.told_stays_true(a_run(RunStatus.CANCELLED), RunStatus.CANCELLED))
    assert not good(must.told_stays_true(a_run(RunStatus.SUCCEEDED), RunStatus.CANCELLED))


def test_nobody_was_told_of_a_decision_that_was_not_taken() -> None:
    approved, rejected = Step(StepStatus.SUCCEEDED), Step(StepStatus.FAILED)
    assert good(must.decision_stays_true("review", approved, ["approve"]))
    assert good(must.decision_stays_true("review", rejected, ["reject"]))
    assert not good(must.decision_stays_true("review", approved, ["approve", "reject"]))
    assert not good(must.decision_stays_true("review", rejected, ["approve"]))


@pytest.mark.parametrize(
    ("delay_ms", "is_good"),
    [(299, False), (300, True), (700, True), (750, False), (800, True), (1_200, True)],
)
def test_a_call_comes_again_within_the_window(delay_ms: int, is_good: bool) -> None:
    assert good(must.call_retries_in_bounds(delay_ms, [Settings()])) is is_good


def test_a_fixed_rhythm_is_exact() -> None:
    fixed = [Settings(lock_busy=LockBusy(retry=Fixed(delay_ms=500)))]
    assert good(must.call_retries_in_bounds(500, fixed))
    assert not good(must.call_retries_in_bounds(501, fixed))


def retrying(delay_ms: int, retry_after_ms: int) -> Retrying:
    return Retrying(
        call="start",
        attempt=1,
        retry_class=RetryClass.QUOTA,
        delay_ms=delay_ms,
        retry_after_ms=retry_after_ms,
    )


def test_a_caller_honours_the_servers_word() -> None:
    assert good(must.client_retries_in_bounds(retrying(20_000, 20_000), RETRIES))
    assert good(must.client_retries_in_bounds(retrying(25_000, 20_000), RETRIES))
    assert not good(must.client_retries_in_bounds(retrying(19_999, 20_000), RETRIES))
    assert not good(must.client_retries_in_bounds(retrying(26_000, 20_000), RETRIES))


def test_a_budget_is_a_burst_and_a_rate() -> None:
    budget = Budget(tokens_max=3, refill_per_s=1.0)
    assert good(must.retries_in_budget(RetryClass.QUOTA, budget, retries=5, elapsed_ms=2_000))
    assert not good(must.retries_in_budget(RetryClass.QUOTA, budget, retries=6, elapsed_ms=2_000))


@pytest.mark.parametrize(
    ("status", "asked_ms", "is_good"),
    [
        (429, 1_000, True),
        (429, 30_000, True),
        (429, 30_001, False),
        (503, 10_000, True),
        (503, 10_001, False),
        (503, 999, False),
        (429, None, False),
        (200, None, True),
    ],
)
def test_a_refusal_says_when_to_come_again(
    status: int, asked_ms: int | None, is_good: bool
) -> None:
    assert good(must.retry_after_in_bounds(status, asked_ms)) is is_good


def looked_after(state: MemoryState, file: RunFile) -> bool:
    return good(must.owned_queued_or_finished(state, file, now=NOW, grace_ms=100))


def test_a_run_with_nothing_overdue_is_looked_after() -> None:
    state, file = shelf_with()
    assert looked_after(state, file)


def test_events_with_a_row_that_is_long_due_are_not_looked_after() -> None:
    state, file = shelf_with()
    file.inbox["one"] = CancelRequested()
    assert not looked_after(state, file)
    state.outbox.put(RUN, Instant(NOW - 101))
    assert not looked_after(state, file)
    state.outbox.put(RUN, Instant(NOW - 100))
    assert looked_after(state, file)


def test_a_timer_that_is_long_due_is_not_looked_after() -> None:
    state, file = shelf_with()
    file.timers[Timer(TimerKind.RUN_TIMEOUT)] = Instant(NOW - 101)
    assert not looked_after(state, file)


def test_a_lease_that_ran_out_long_ago_is_not_looked_after() -> None:
    state, file = shelf_with()
    file.jobs.append(JOB)
    state.jobs[JOB] = a_job(state=JobState.LEASED, expires_at=Instant(NOW - 101))
    assert not looked_after(state, file)
    state.jobs[JOB] = a_job(state=JobState.LEASED, expires_at=NOW)
    assert looked_after(state, file)


def test_a_result_that_was_accepted_and_never_applied_is_lost() -> None:
    waiting = Step(StepStatus.RUNNING, attempt=1, wait=OnJob(JOB))
    state, file = shelf_with(a_run(a=waiting))
    file.jobs.append(JOB)
    state.jobs[JOB] = a_job(state=JobState.FINISHED)
    assert not looked_after(state, file)


def test_a_list_that_is_not_what_a_scan_finds_is_named() -> None:
    state, file = shelf_with()
    (missing, *_) = must.lists_are_scans(state)
    assert "lost ['run']" in missing
    state.places.add(file.run)
    assert good(must.lists_are_scans(state))
    del state.runs[RUN]
    assert any("gone ['run']" in said for said in must.lists_are_scans(state))


def test_a_schedule_that_runs_handles_its_ticks() -> None:
    spec = {"every_s": 5, "jitter_s": 1, "overlap": "skip"}
    due_ms = 11_000 + must.TICK_GRACE_MS
    for change, late_ms, is_good in (
        ({}, due_ms, True),
        ({}, due_ms + 1, False),
        ({"paused": True}, due_ms + 1, True),
        ({"overlap": "queue"}, due_ms + 1, True),
        ({"catch_up": "all"}, due_ms + 1, True),
    ):
        schedule = {"spec": spec | change, "handled": 7}
        found = must.ticks_are_looked_after("s", schedule, now=7 + late_ms)
        assert good(found) is is_good, change


def test_ticks_have_one_run_or_are_missed() -> None:
    assert good(must.one_run_per_tick("s", 5, {"a"}))
    assert not good(must.one_run_per_tick("s", 5, {"a", "b"}))
    assert good(must.tick_is_due("s", 30, since=10, every_ms=10, now=30))
    for tick, now in ((10, 99), (35, 99), (30, 29)):
        assert not good(must.tick_is_due("s", tick, since=10, every_ms=10, now=now))
    assert good(must.ticks_have_outcomes("s", [1, 2], runs={1}, missed={2}))
    for runs, missed in (({1}, set[int]()), ({1, 2}, {2})):
        assert not good(must.ticks_have_outcomes("s", [1, 2], runs=runs, missed=missed))


def test_bulk_actions_go_forward_once_and_end() -> None:
    assert good(must.bulk_matches("b", ["r1", "r2"], ["r2", "r1"]))
    assert not good(must.bulk_matches("b", ["r1"], ["r2", "r1"]))
    assert not good(must.bulk_matches("b", ["r1", "r1"], ["r1"]))
    forward = {"done": 1, "failed": 1, "next": 3}
    assert good(must.bulk_goes_forward("b", before=1, value=forward, matched=3))
    assert not good(must.bulk_goes_forward("b", before=3, value=forward, matched=3))
    assert not good(must.bulk_goes_forward("b", before=1, value=forward, matched=2))
    over = {**forward, "status": "finished"}
    assert not good(must.bulk_goes_forward("b", before=1, value=over, matched=3))
    skipped = {"done": 1, "failed": 1, "skipped": 2, "next": 3}
    assert not good(must.bulk_goes_forward("b", before=1, value=skipped, matched=3))
    assert good(must.bulk_goes_forward("b", before=1, value={**skipped, "skipped": 1}, matched=3))
    assert good(must.bulk_keeps_rate("b", taken=3, most=3.0))
    assert not good(must.bulk_keeps_rate("b", taken=4, most=3.0))
    assert good(must.acted_once(("b", "run.cancel", "run/r"), 1))
    assert not good(must.acted_once(("b", "run.cancel", "run/r"), 2))
    assert good(must.bulks_end({"k": ["b"]}, {"b": "finished"}))
    for told, statuses in (({"k": ["b"]}, {"b": "running"}), ({"k": ["b"]}, dict[str, str]())):
        assert not good(must.bulks_end(told, statuses))
    assert not good(must.bulks_end({"k": ["b", "c"]}, {"b": "finished", "c": "stopped"}))


def test_escalation_follows_its_counts_and_recovers_after_quiet_time() -> None:
    assert good(must.escalation_follows("a", is_up=True, must_trip=True))
    assert not good(must.escalation_follows("a", is_up=True, must_trip=False))
    assert not good(must.escalation_follows("a", is_up=False, must_trip=True))
    for quiet_ms, probes, is_good in ((10, 2, True), (9, 2, False), (10, 1, False)):
        said = must.recovery_was_quiet(
            "a", quiet_ms=quiet_ms, dwell_ms=10, probes=probes, probes_min=2
        )
        assert good(said) is is_good


def test_a_deadline_is_not_after_the_servers() -> None:
    assert good(must.belief_is_covered("a", believed_ms=900, kept_ms=1_000))
    assert not good(must.belief_is_covered("a", believed_ms=1_100, kept_ms=1_000))
    assert good(must.belief_is_covered("a", believed_ms=-5, kept_ms=-10))
    assert not good(must.belief_is_covered("a", believed_ms=50, kept_ms=-10))


def test_a_lease_lasts_its_term_and_is_renewed_only_while_it_stands() -> None:
    later = Instant(NOW + 100)
    assert good(must.term_is_as_asked("a", until=later, now=NOW, ttl_ms=100))
    assert not good(must.term_is_as_asked("a", until=later, now=NOW, ttl_ms=99))
    assert not good(must.term_is_as_asked("a", until=None, now=NOW, ttl_ms=99))
    for holder, until, is_good in ((7, later, True), (8, later, False), (7, NOW, False)):
        said = must.renewal_extends_what_stands("a", fence=7, holder=holder, until=until, now=NOW)
        assert good(said) is is_good


def test_registers_refuse_no_owner_and_have_one_writer_for_a_fence() -> None:
    assert good(must.owner_can_write("a", 1, is_written=True))
    assert not good(must.owner_can_write("a", 1, is_written=False))
    assert good(must.one_writer_per_fence("a", 1, "x/1", "x/1"))
    assert not good(must.one_writer_per_fence("a", 1, "x/1", "x/2"))


def test_single_jobs_are_within_their_rate_and_refused_only_above_it() -> None:
    assert good(must.within_rate("acme", [0, 2_000, 4_000], 0.5))
    assert not good(must.within_rate("acme", [0, 1_999], 0.5))
    assert good(must.within_rate("acme", [0, 0, 0, 334], 3.0))
    assert not good(must.within_rate("acme", [0, 0, 0, 332], 3.0))
    assert good(must.throttled_with_reason("acme", [0], Instant(1_999), 0.5))
    assert not good(must.throttled_with_reason("acme", [0], Instant(2_000), 0.5))


def test_only_runs_past_their_retention_are_removed() -> None:
    ended = structs.replace(a_run(RunStatus.SUCCEEDED), finished_at=NOW)
    assert good(must.only_old_runs_removed([ended], 1, NOW))
    assert not good(must.only_old_runs_removed([ended], 2, NOW))
    assert not good(must.only_old_runs_removed([ended], 1, Instant(NOW - 1)))
    assert not good(must.only_old_runs_removed([a_run()], 1, NOW))


def test_subscribers_see_every_line_once_and_in_order() -> None:
    assert good(must.all_seen_once("acme", stored=[1, 2, 2], seen=[1, 2, 2]))
    for seen in ([1, 2], [1, 2, 2, 2], [2, 1, 2]):
        assert not good(must.all_seen_once("acme", stored=[1, 2, 2], seen=seen))


def test_a_patch_is_in_the_settings_and_callers_wait_as_asked() -> None:
    assert good(must.patch_is_applied({"a": {"b": 1}}, {"a": {"b": 1, "c": 2}}))
    assert not good(must.patch_is_applied({"a": {"b": 1}}, {"a": {"b": 2}}))
    assert not good(must.patch_is_applied({"a": {"b": 1}}, {}))
    assert good(must.waited_as_asked(1.2, 1.2))
    assert not good(must.waited_as_asked(1.1, 1.2))


def test_the_settings_in_force_are_those_that_are_stored_and_read() -> None:
    other = structs.replace(DEFAULTS, admission=AdmissionSettings(lock_wait_s=1))

    def in_force(acts_by: Settings, has_read: Settings) -> bool:
        return good(must.settings_in_force("one", stored=other, acts_by=acts_by, has_read=has_read))

    assert in_force(other, other)
    assert not in_force(DEFAULTS, other)
    assert not in_force(other, DEFAULTS)


def test_no_valid_request_is_called_invalid() -> None:
    assert good(must.valid_request_is_understood("start", 200, b"{}"))
    assert good(must.valid_request_is_understood("start", 422, b'{"code":"idempotency_mismatch"}'))
    assert not good(must.valid_request_is_understood("start", 422, b'{"code":"invalid_request"}'))
    assert not good(must.valid_request_is_understood("start", 500, b""))
    cursor = b'{"detail":"cursor: not a cursor of this list"}'
    assert good(must.valid_request_is_understood("timeline", 422, cursor, may_be_lost=True))
    assert not good(must.valid_request_is_understood("timeline", 422, cursor))
    assert not good(must.valid_request_is_understood("timeline", 422, b"", may_be_lost=True))


# ── What processes show ──────────────────────────────────────────────────────────────────────────


def facts(run: Run, inbox: int) -> RunFacts:
    return RunFacts(run=run, at=NOW, inbox=inbox)


def test_an_explanation_names_accepted_events_exactly_if_there_are_some() -> None:
    inbox = Finding(
        code=WhyCode.RETRY_PENDING, detail="1 event", remedy="", blocked_by=Blocker(kind="inbox")
    )
    assert good(must.why_names_facts(facts(a_run(), 1), [inbox]))
    assert good(must.why_names_facts(facts(a_run(), 0), []))
    assert not good(must.why_names_facts(facts(a_run(), 1), []))
    assert not good(must.why_names_facts(facts(a_run(), 0), [inbox]))
    assert good(must.why_names_facts(facts(a_run(RunStatus.QUEUED), 1), []))


def test_an_explanation_of_a_failed_run_has_its_error_and_what_helps() -> None:
    def of(code: str, detail: str, remedy: str) -> bool:
        run = structs.replace(a_run(RunStatus.FAILED), error=Failure(code, "too few"))
        ended = Finding(code=WhyCode.FINISHED, detail=detail, remedy=remedy)
        return good(must.why_names_facts(facts(run, 0), [ended]))

    assert of("job_failed", "it failed: too few", "rerun it")
    assert of("invalid_input", "it failed: too few", "rerun it with --input")
    assert not of("job_failed", "it failed", "rerun it")
    assert not of("job_failed", "it failed: too few", "rerun it with --input")
    assert not of("invalid_input", "it failed: too few", "rerun it")


@pytest.mark.parametrize(
    ("actor", "starter", "is_right"),
    [
        ("caller", "caller", True),
        ("caller", None, False),
        ("caller", "other", False),
        ("schedule s", "author", True),
        ("schedule s", None, False),
    ],
)
def test_the_starter_of_a_run_is_who_asked_for_it(
    actor: str, starter: str | None, is_right: bool
) -> None:
    line = TimelineEntry(at=NOW, what="run_started", actor=actor)
    transition = Transition(status=RunStatus.RUNNING, timeline=(line,))
    run = structs.replace(a_run(), starter=starter)
    assert good(must.starter_is_actor(transition, run)) is is_right


def test_offsets_counts_and_durations_are_those_that_were_seen() -> None:
    assert good(shown.offset_is_right("replica", shown_ms=7, expected_ms=8))
    assert not good(shown.offset_is_right("replica", shown_ms=7, expected_ms=20))
    assert good(shown.same_count("duplicates", shown=2.0, seen=2))
    assert not good(shown.same_count("duplicates", shown=4.0, seen=2))
    assert good(shown.is_whole_ms("held", sum([0.001] * 1_000)))
    assert not good(shown.is_whole_ms("held", 12 / 1_001))
