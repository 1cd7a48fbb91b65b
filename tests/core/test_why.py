"""Why a run does not go on: every code, and that something is always named."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from stanchion.core.events import Timer, TimerKind
from stanchion.core.json_value import JsonObject
from stanchion.core.model import (
    Failure,
    Instant,
    ItemCounts,
    JobId,
    OnDecision,
    OnDelay,
    OnItems,
    OnJob,
    OnReplay,
    OnRetry,
    Run,
    RunId,
    RunStatus,
    Step,
    StepId,
    StepStatus,
    TenantId,
    Topic,
    Wait,
    WorkflowId,
)
from stanchion.core.queue import QueuePlace
from stanchion.core.why import (
    Blocker,
    ClosedClass,
    DeadWork,
    Finding,
    OpenJob,
    OpenJobState,
    Outage,
    PendingTimer,
    ReachedLimit,
    RunFacts,
    RunLock,
    Surroundings,
    TopicDemand,
    WhyCode,
    remedy_for,
    store_outage,
    why,
)
from stanchion.core.workflow import Workflow
from tests.core.strategies import INPUTS, families, step_forward
from tests.core.world import World, planned

NOW = Instant(1_700_000_000_000)
BEGAN, LATER = Instant(NOW - 5_000), Instant(NOW + 9_000)
STEP, TOPIC = StepId("publish.render"), Topic("render")
JOB = JobId("r1:publish.render@1")


def run(wait: Wait | None = None, *, status: RunStatus = RunStatus.RUNNING) -> Run:
    """A run with one active step."""
    step = Step(status=StepStatus.RUNNING, attempt=1, wait=wait, started_at=BEGAN)
    return Run(
        id=RunId("r1"),
        tenant=TenantId("acme"),
        workflow_id=WorkflowId("w"),
        workflow_version=1,
        input={},
        created_at=BEGAN,
        status=status,
        steps={} if wait is None else {STEP: step},
    )


def job(**members: object) -> OpenJob:
    base = OpenJob(id=JOB, step_id=STEP, topic=TOPIC, state=OpenJobState.READY, ahead=3)
    return replace(base, **members)


READY = RunFacts(at=NOW, run=run(OnJob(JOB)), jobs=(job(),))
SILENT = TopicDemand(Instant(NOW - 60_001), is_known=True, seen_at=NOW)
ASKED = TopicDemand(Instant(NOW - 60_000), is_known=True, seen_at=NOW)
NEVER = TopicDemand(None, is_known=True, seen_at=NOW)
UNKNOWN = TopicDemand(None, is_known=False, seen_at=NOW)
LEASED = replace(
    READY,
    jobs=(
        job(
            state=OpenJobState.LEASED,
            worker_id="w-1",
            fence=17,
            deliveries=2,
            expires_at=LATER,
            ahead=None,
        ),
    ),
)
LOCK = RunLock("run/r1", 9, LATER, NOW, holder="replica-2")
CLOSED = ClosedClass("policies.high.on_lock_error = fail_closed", BEGAN, NOW, "restore it")
LOCKS_OUT = Outage("locks", "refused", BEGAN, NOW)
LETTER = DeadWork(id="job:x#1", step_id=STEP, cause="delivered 5 times", at=BEGAN)

CASES: dict[str, tuple[RunFacts, Surroundings, WhyCode, str, str]] = {
    "finished": (
        RunFacts(at=NOW, run=replace(run(status=RunStatus.SUCCEEDED), finished_at=BEGAN)),
        Surroundings(),
        WhyCode.FINISHED,
        "the run has ended: succeeded",
        "stanchion run show r1",
    ),
    "failed": (
        RunFacts(at=NOW, run=replace(run(status=RunStatus.FAILED), error=Failure("bad", "no"))),
        Surroundings(lock=LOCK, outages=(LOCKS_OUT,)),
        WhyCode.FINISHED,
        "failed, no (bad)",
        "stanchion run rerun r1",
    ),
    **{
        f"failed with {code}": (
            RunFacts(at=NOW, run=replace(run(status=RunStatus.FAILED), error=Failure(code, "no"))),
            Surroundings(),
            WhyCode.FINISHED,
            f"failed, no ({code})",
            "with another input: stanchion run rerun r1 --input @input.json;",
        )
        for code in ("expression_error", "invalid_input")
    },
    "queued": (
        replace(READY, place=QueuePlace(3, 5, "blue")),
        Surroundings(cap=2),
        WhyCode.QUEUED,
        (
            "tenant 'acme' is full; position 3 in its queue, 2 runs ahead: priority 5 (higher ones"
            " go first), fairness key 'blue' (keys of one priority take turns, oldest run first)"
        ),
        "wait for a slot, or let an admin raise the cap: stanchion tenant set acme",
    ),
    "queued without a key": (
        replace(READY, place=QueuePlace(2, 9, "")),
        Surroundings(),
        WhyCode.QUEUED,
        "1 run ahead: priority 9 (higher ones go first), fairness key none (",
        "stanchion run cancel r1",
    ),
    "queued at cap 0": (
        replace(READY, place=QueuePlace(1, 5, "")),
        Surroundings(cap=0),
        WhyCode.QUEUED,
        "tenant 'acme' may have no active run (max_concurrent_runs is 0); position 1 in its queue",
        "no slot becomes free before an admin raises the cap: stanchion tenant set acme",
    ),
    "approval": (
        RunFacts(at=NOW, run=run(OnDecision("Is it good?", LATER))),
        Surroundings(),
        WhyCode.APPROVAL_PENDING,
        "step 'publish.render' waits for a decision: Is it good?",
        "stanchion approval approve r1 publish.render, or",
    ),
    "approval with data": (
        RunFacts(at=NOW, run=run(OnDecision("Is it good?", LATER))),
        Surroundings(needs_data=frozenset({STEP})),
        WhyCode.APPROVAL_PENDING,
        "step 'publish.render' waits for a decision: Is it good?",
        "stanchion approval approve r1 publish.render --data @data.json, or",
    ),
    "approval of another person": (
        RunFacts(at=NOW, run=replace(run(OnDecision("Is it good?")), starter="sam")),
        Surroundings(not_by_starter=frozenset({STEP})),
        WhyCode.APPROVAL_PENDING,
        "waits for a decision of another person than 'sam': Is it good?",
        "stanchion approval approve r1 publish.render, or",
    ),
    "delay": (
        RunFacts(at=NOW, run=run(OnDelay(LATER))),
        Surroundings(),
        WhyCode.DELAY_PENDING,
        "waits for the end of its delay",
        "stanchion run cancel r1",
    ),
    "retry": (
        RunFacts(at=NOW, run=run(OnRetry(LATER))),
        Surroundings(),
        WhyCode.RETRY_PENDING,
        "the last attempt at step 'publish.render' failed",
        "stanchion run show r1 --timeline",
    ),
    "no worker": (
        READY,
        Surroundings(topics={TOPIC: SILENT}),
        WhyCode.NO_WORKER,
        "no worker has asked for topic 'render' of tenant 'acme' for 60 s",
        "stanchion worker MODULE:APP",
    ),
    "no worker ever": (
        READY,
        Surroundings(topics={TOPIC: NEVER}),
        WhyCode.NO_WORKER,
        "the job of step 'publish.render' is ready",
        "'render'",
    ),
    "a server that has just begun does not know": (
        READY,
        Surroundings(topics={TOPIC: UNKNOWN}),
        WhyCode.JOB_READY,
        "is known 60 s after the last start",
        "stanchion worker list",
    ),
    "ready": (
        READY,
        Surroundings(topics={TOPIC: ASKED}),
        WhyCode.JOB_READY,
        "waits for a worker of topic 'render'; 3 jobs of this tenant ahead",
        "stanchion worker list",
    ),
    "leased": (
        LEASED,
        Surroundings(topics={TOPIC: SILENT}),
        WhyCode.JOB_LEASED,
        "worker 'w-1' has the job of step 'publish.render' (fence 17, delivery 2)",
        f"stanchion job show {JOB}",
    ),
    "lease over": (
        replace(LEASED, at=LATER),
        Surroundings(),
        WhyCode.JOB_LEASED,
        "its lease has expired and the job is offered again",
        "stanchion job show",
    ),
    "limited": (
        READY,
        Surroundings(limits={TOPIC: ReachedLimit("llm", "5 at a time", "a result", NOW)}),
        WhyCode.TOPIC_LIMITED,
        "limit 'llm' holds back the job of step 'publish.render': 5 at a time; room",
        "stanchion limit set llm --max-running N;",
    ),
    "limited by a rate": (
        READY,
        Surroundings(limits={TOPIC: ReachedLimit("llm", "5 a second", "time", NOW, LATER)}),
        WhyCode.TOPIC_LIMITED,
        "limit 'llm' holds back the job of step 'publish.render': 5 a second; room",
        "stanchion limit set llm --rate-per-s N;",
    ),
    "suspended": (
        replace(READY, jobs=(job(state=OpenJobState.SUSPENDED),)),
        Surroundings(),
        WhyCode.SUSPENDED,
        "asked a question and waits for the answer",
        "stanchion approval list",
    ),
    "dead letter": (
        RunFacts(at=NOW, run=run(OnReplay(JOB)), letters=(LETTER,)),
        Surroundings(),
        WhyCode.DEAD_LETTER,
        "the job of step 'publish.render' is a dead letter: delivered 5 times",
        "stanchion dead-letter replay job:x#1",
    ),
    "dead event": (
        replace(LEASED, letters=(replace(LETTER, id="event:r1:cancel", step_id=None),)),
        Surroundings(),
        WhyCode.DEAD_LETTER,
        "an event of the run is a dead letter",
        "stanchion dead-letter discard event:r1:cancel",
    ),
    "locked": (
        RunFacts(at=NOW, run=run(OnJob(JOB)), inbox=2, next_try_at=LATER),
        Surroundings(lock=LOCK),
        WhyCode.RUN_LOCKED,
        "'replica-2' holds the run's lease; 2 accepted events to be applied",
        "stanchion lease release run/r1",
    ),
    "events to be applied": (
        RunFacts(at=NOW, run=run(OnJob(JOB)), inbox=1, failures=2, next_try_at=LATER),
        Surroundings(),
        WhyCode.RETRY_PENDING,
        "1 accepted event to be applied at the next try; applying them failed 2 times",
        "inbox_entry_failed",
    ),
    "closed": (
        replace(LEASED, inbox=1),
        Surroundings(closed=CLOSED, lock=LOCK, outages=(LOCKS_OUT,)),
        WhyCode.CLASS_CLOSED,
        "policies.high.on_lock_error = fail_closed",
        "restore it",
    ),
    "nothing is waited for": (
        RunFacts(at=NOW, run=run()),
        Surroundings(outages=(LOCKS_OUT,)),
        WhyCode.RETRY_PENDING,
        "0 accepted events",
        "stanchion run why r1",
    ),
}


@pytest.mark.parametrize(("demand", "since"), [(SILENT, SILENT.asked_at), (NEVER, BEGAN)])
def test_no_worker_is_since_one_last_asked_or_if_none_has_since_the_job(
    demand: TopicDemand, since: Instant
) -> None:
    first, *_ = why(READY, Surroundings(topics={TOPIC: demand}))
    assert (first.code, first.since) == (WhyCode.NO_WORKER, since)


@pytest.mark.parametrize(
    ("facts", "around", "code", "detail", "remedy"), CASES.values(), ids=list(CASES)
)
def test_each_cause_has_a_code_a_sentence_and_a_remedy(
    facts: RunFacts, around: Surroundings, code: WhyCode, detail: str, remedy: str
) -> None:
    first = why(facts, around)[0]
    assert first.code is code
    assert detail in first.detail
    assert remedy in first.remedy


def test_commands_of_a_remedy_name_the_tenant() -> None:
    remedy = "stanchion approval approve R s, or stanchion run cancel R; see: stanchion worker list"
    assert remedy_for(remedy, None) == remedy
    assert remedy_for(remedy, "acme") == (
        "stanchion approval approve R s --tenant acme, or stanchion run cancel R --tenant acme;"
        " see: stanchion worker list"
    )


def test_every_code_is_in_the_table() -> None:
    told = {code for _, _, code, _, _ in CASES.values()}
    assert told | {store_outage(LOCKS_OUT).code} == set(WhyCode)


def only(facts: RunFacts, around: Surroundings | None = None) -> Finding:
    (finding,) = why(facts, around or Surroundings())
    return finding


def test_times_and_what_blocks_are_data() -> None:
    leased = only(LEASED)
    assert (leased.step_id, leased.since, leased.until) == (STEP, BEGAN, LATER)
    assert leased.blocked_by == Blocker(kind="job", id=JOB, topic=TOPIC, worker_id="w-1", fence=17)
    ready = only(READY, Surroundings(topics={TOPIC: ASKED}))
    assert ready.blocked_by == Blocker(kind="job", id=JOB, topic=TOPIC, ahead=3, seen_at=NOW)
    silent = only(READY, Surroundings(topics={TOPIC: SILENT}))
    assert silent.since == SILENT.asked_at
    assert only(RunFacts(at=NOW, run=run(OnDelay(LATER)))).until == LATER
    assert only(RunFacts(at=NOW, run=run(OnDecision(None, LATER)))).until == LATER
    closed = why(READY, Surroundings(closed=CLOSED))[0]
    assert (closed.since, closed.blocked_by) == (
        BEGAN,
        Blocker(kind="rule", rule=CLOSED.rule, seen_at=NOW),
    )


def test_items_of_one_step_are_one_finding_for_each_cause() -> None:
    jobs = [
        job(id=JobId(f"r1:{STEP}[{n}]@1"), item=n, ahead=0 if n == 4 else None) for n in range(2, 7)
    ]
    jobs += [
        job(item=n, state=OpenJobState.LEASED, worker_id=f"w{n}", expires_at=Instant(NOW + n))
        for n in (7, 8)
    ]
    timers = [
        PendingTimer(Timer(TimerKind.RETRY, STEP, 9, 1), LATER),
        PendingTimer(Timer(TimerKind.RETRY, STEP, 1, 2), NOW),
        PendingTimer(Timer(TimerKind.RUN_TIMEOUT), NOW),
    ]
    letter = replace(LETTER, item=0)
    held = replace(run(OnItems()).steps[STEP], items=ItemCounts(total=10))
    facts = RunFacts(
        at=NOW,
        run=replace(run(), steps={STEP: held}),
        jobs=tuple(jobs),
        timers=tuple(timers),
        letters=(letter,),
    )
    found = {each.code: each for each in why(facts, Surroundings())}
    assert list(found) == ["dead_letter", "job_ready", "retry_pending", "job_leased"]
    assert "item 4 of step 'publish.render' (and 4 other items)" in found[WhyCode.JOB_READY].detail
    assert "item 7 of step 'publish.render' (and 1 other item)" in found[WhyCode.JOB_LEASED].detail
    retry = found[WhyCode.RETRY_PENDING]
    assert "item 1 of step 'publish.render' failed, and 1 other item" in retry.detail
    assert retry.until == NOW
    items = {each.code: each.blocked_by and each.blocked_by.item for each in found.values()}
    assert list(items.values()) == [0, 4, 1, 7]


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_command_that_needs_a_role_is_said_with_the_role(name: str) -> None:
    facts, around, *_ = CASES[name]
    for finding in why(facts, around):
        for command, roles in FOR_ROLES.items():
            before, *found = finding.remedy.split(f"stanchion {command}")
            assert not found or any(f"an {role} " in before for role in roles), finding.remedy


FOR_ROLES = {
    "tenant set": ["admin"],
    "limit set": ["admin"],
    "limit show": ["operator"],
    "lease release": ["operator"],
    "dead-letter": ["operator"],
    "worker list": ["operator"],
    "replica list": ["operator"],
}
"""The roles that the first use of a command needs."""


def test_an_approval_with_an_accepted_decision_waits_for_no_decision() -> None:
    asked = RunFacts(at=NOW, run=run(OnDecision("Is it good?", LATER)), inbox=1)
    other = replace(asked, decided=frozenset({StepId("another")}))
    decided = replace(asked, decided=frozenset({STEP}))
    for around, cause in (
        (Surroundings(), "retry_pending"),
        (Surroundings(lock=LOCK), "run_locked"),
        (Surroundings(closed=CLOSED), "class_closed"),
    ):
        assert [each.code for each in why(decided, around)] == [cause]
        assert {each.code for each in why(other, around)} == {cause, "approval_pending"}


def test_what_is_no_cause_now_comes_last() -> None:
    by_hand = replace(LOCK, is_by_hand=True, holder="kim")
    bus = Outage("bus", "refused", None, NOW)
    found = why(LEASED, Surroundings(lock=by_hand, outages=(LOCKS_OUT, bus)))
    assert [each.code for each in found] == [
        "job_leased",
        "run_locked",
        "backend_unavailable",
        "backend_unavailable",
    ]
    assert found[1].remedy == "an operator can release it: stanchion lease release run/r1"
    assert "class 'standard' goes on without it" in found[2].detail
    assert why(LEASED, Surroundings(lock=LOCK))[0].code == "job_leased"


def test_while_the_store_is_away_that_is_said() -> None:
    told = store_outage(Outage("store", "refused", BEGAN, NOW))
    assert told.code is WhyCode.BACKEND_UNAVAILABLE
    assert told.blocked_by == Blocker(kind="backend", id="store", seen_at=NOW)


LEAVES: dict[type[object], set[WhyCode]] = {
    OnDecision: {WhyCode.APPROVAL_PENDING},
    OnDelay: {WhyCode.DELAY_PENDING},
    OnRetry: {WhyCode.RETRY_PENDING},
    OnReplay: {WhyCode.DEAD_LETTER},
    OnJob: {WhyCode.JOB_READY, WhyCode.JOB_LEASED, WhyCode.NO_WORKER},
}
Family = tuple[Workflow, dict[WorkflowId, Workflow]]
SEEDS = st.integers(0, 2**32)


@given(families(), INPUTS, SEEDS, SEEDS)
@settings(max_examples=60)
def test_whatever_happens_next_was_named_before(
    family: Family, run_input: JsonObject, order: int, seed: int
) -> None:
    world, chance = World.started(planned(*family), run_input), Random(order)
    for _ in range(100):
        before, facts = world.run, _facts(world, chance)
        found = why(facts, _around(facts, chance))
        if before.status.is_finished:
            assert [each.code for each in found] == [WhyCode.FINISHED]
            return
        assert found
        assert found[0].code is not WhyCode.FINISHED
        assert all(each.remedy and each.detail for each in found)
        named = {(each.step_id, each.code) for each in found}
        for step_id, step in before.steps.items():
            if step.status.is_active and type(step.wait) in LEAVES:
                assert named & {(step_id, code) for code in LEAVES[type(step.wait)]}, step
        step_forward(world, chance, seed, timeouts=False)
        inside = world.plan.item_steps
        named_steps = {inside.get(each.step_id or STEP, each.step_id) for each in found}
        for step_id, step in world.run.steps.items():
            was = before.step(step_id)
            # A step that changed while it waited for a result, a timer or a person. The others
            # follow from it: sub-workflows that end, steps that begin.
            if was.wait is not None and step != was and type(was.wait) in {*LEAVES, OnItems}:
                assert step_id in named_steps or world.run.status.is_finished


def _facts(world: World, chance: Random) -> RunFacts:
    jobs = []
    for each in world.jobs.values():
        state = chance.choice([OpenJobState.READY, OpenJobState.LEASED])
        is_ready = state is OpenJobState.READY
        jobs.append(
            OpenJob(
                id=each.id,
                step_id=each.step_id,
                item=each.item,
                topic=each.topic,
                state=state,
                worker_id=None if is_ready else "w",
                expires_at=None if is_ready else world.now,
            )
        )
    return RunFacts(
        at=world.now,
        run=world.run,
        jobs=tuple(jobs),
        timers=tuple(PendingTimer(timer, due) for timer, due in world.timers.items()),
        letters=tuple(
            DeadWork(
                id=f"job:{each.id}",
                step_id=each.step_id,
                item=each.item,
                cause="died",
                at=world.now,
            )
            for each in world.dead.values()
        ),
    )


def _around(facts: RunFacts, chance: Random) -> Surroundings:
    demands = (NEVER, UNKNOWN, None)
    topics = {each.topic: chance.choice(demands) for each in facts.jobs}
    return Surroundings(topics={name: said for name, said in topics.items() if said is not None})


@pytest.mark.parametrize(
    ("due", "limit", "until"),
    [
        (None, None, None),
        (LATER, None, LATER),
        (None, LATER, LATER),
        (Instant(LATER + 1), LATER, LATER),
    ],
)
def test_an_approval_ends_with_its_time_limit_or_that_of_its_step(
    due: Instant | None, limit: Instant | None, until: Instant | None
) -> None:
    timers = () if limit is None else (PendingTimer(Timer(TimerKind.STEP_TIMEOUT, STEP), limit),)
    facts = RunFacts(at=NOW, run=run(OnDecision("Is it good?", due)), timers=timers)
    (finding,) = why(facts, Surroundings())
    assert finding.until == until
