"""The oracle of meaning: what a run must have given, computed from its workflow and the workload.

When a run ends, every step's status, output and timeline lines are derived from the documents of
``workflows`` and from what handlers do, without the code that decided. What depends on time (a time
limit, a cancel, a decision, a dead letter) is taken from what people and servers did, as the ledger
saw it; everything else follows from it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from stanchion.core.events import Approved, CancelRequested, Rejected
from stanchion.core.model import Item, ItemKey, Run, RunId, Step, StepId, StepStatus
from stanchion.core.transition import TimelineEntry
from stanchion.ports.records import Committed, PostAnswer
from stanchion.sim.workflows import DOCUMENTS, Document, Fails, Means, Scope, StepInScope, handled

if TYPE_CHECKING:
    from stanchion.adapters.store.memory.state import RunFile
    from stanchion.sim.ledger import Ledger, SeenCommand
    from stanchion.sim.workload import Callers, RerunTold
    from stanchion.sim.world import World
    from stanchion.wire.runs import RerunPlan, RunView, TimelineLine

_OK: Final = frozenset({"succeeded", "skipped"})
_FAILURES: Final = frozenset({"failed", "timed_out"})
_STOPPED: Final = frozenset({"cancelled", "timed_out"})
_TOLD: Final = frozenset({"succeeded", "failed", "skipped"})
"""Ends of steps that are in the timeline. Those of steps that were stopped with others are not."""


class Decision(NamedTuple):
    """What a person decided about a step."""

    is_approved: bool
    actor: str
    comment: str | None
    data: Any


class RunIncidents(NamedTuple):
    """What happened to a run beside the results of its jobs."""

    cancels: int = 0
    decisions: Mapping[str, Sequence[Decision]] = {}
    """By step, in the order in which the store took them."""
    discarded: Collection[str] = ()
    timed_out: Collection[str] = ()
    """Jobs whose attempt took too long."""
    origins: Mapping[str, str] = {}
    """Steps that a rerun keeps, with the run that they are from."""
    is_sure: bool = True
    """Whether no facts can be missing: the store has not lost any."""


class _Place(NamedTuple):
    """A body of steps inside a run: that of the run, of a sub-workflow, or of an item."""

    steps: Document
    prefix: str
    item: int | None
    """The index of the item that it is the body of."""
    given: Any
    has_outputs: bool = True
    is_stopped: bool = False
    """Whether it was ended from outside."""


class _End(NamedTuple):
    status: str
    output: Any = None
    failed_at: str | None = None
    """The step whose failure is that of the body."""


class RunOracle:
    """Judges one run that has ended; ``sentences`` has what is wrong."""

    def __init__(
        self,
        seed: int,
        run: Run,
        items: Mapping[ItemKey, Item],
        timeline: Sequence[TimelineEntry],
        facts: RunIncidents,
    ) -> None:
        self.sentences: list[str] = []
        self._seed = seed
        self._run = run
        self._items = items
        self._timeline = timeline
        self._facts = facts
        self._lines = Counter((line.what, line.step) for line in timeline if line.item is None)

    def judge(self) -> list[str]:
        """What is wrong with the run."""
        run = self._run
        document = DOCUMENTS.get(run.workflow_id)
        if document is None:
            document = {"steps": {"job": {"topic": "plan", "input": run.input.get("input")}}}
            if set(run.steps) != {"job"}:
                return []
        status = str(run.status)
        self._check_timeline(status)
        if all(line.what != "run_started" for line in self._timeline):
            self._never_begun(status)
            return self.sentences
        is_stopped = status in _STOPPED
        end = self._body(
            document,
            run.steps,
            _Place(document["steps"], "", None, run.input, is_stopped=is_stopped),
        )
        if status == "cancelled":
            self._must(bool(self._facts.cancels), "nothing cancelled it")
        elif status == "timed_out":
            self._must(run.error is not None and run.error.code == "run_timeout", "no time-out")
        else:
            self._must(status == end.status, f"it is {status}, and must be {end.status}")
            self._same("output", run.output, end.output)
            at = None if run.error is None else run.error.step
            self._same("failed step", at, end.failed_at)
        return self.sentences

    # ── Bodies ───────────────────────────────────────────────────────────────────────────────────

    def _body(self, document: Document, states: Mapping[StepId, Step], place: _Place) -> _End:
        shown: dict[str, StepInScope] = {}
        failed_at: str | None = None
        for name, spec in document["steps"].items():
            state = states.get(StepId(place.prefix + name), Step())
            end = self._step(name, spec, state, shown, place, states)
            failures = tuple(each.index for each in state.failures)
            shown[name] = StepInScope(str(state.status), end.output, failures)
            if end.status in _FAILURES and spec.get("on_failure") != "continue":
                failed_at = failed_at or end.failed_at or place.prefix + name
        if failed_at is not None:
            return _End("failed", None, failed_at)
        if any(each.status == "cancelled" for each in shown.values()):
            return _End("cancelled")
        if "output" in document:
            return _End("succeeded", render(document["output"], Scope(place.given, shown)))
        needed = {need for spec in document["steps"].values() for need in spec.get("needs", ())}
        leaves = {name: each.output for name, each in shown.items() if name not in needed}
        return _End("succeeded", leaves)

    def _step(
        self,
        name: str,
        spec: Document,
        state: Step,
        shown: Mapping[str, StepInScope],
        place: _Place,
        states: Mapping[StepId, Step],
    ) -> _End:
        step_id, status = place.prefix + name, str(state.status)
        if place.is_stopped and status in _STOPPED and "timeout_s" not in spec:
            return _End(status)
        scope = Scope(place.given, shown)
        if self._is_blocked(spec, shown, place):
            self._must(status == "cancelled", f"{step_id} is {status}, and what it needs failed")
            return _End(status)
        if "when" in spec and not spec["when"].value(scope):
            self._must(status == "skipped", f"{step_id} is {status}, and its condition is false")
            return _End(status)
        if place.is_stopped and status in _STOPPED:
            return _End(status)
        self._must(
            status in {"succeeded", "failed", "timed_out"},
            f"{step_id} is {status}, and nothing kept it from running",
        )
        if status in _TOLD and place.item is None and step_id not in self._facts.origins:
            self._must(
                self._lines[f"step_{status}", StepId(step_id)] == 1,
                f"{step_id} has {self._lines[f'step_{status}', StepId(step_id)]} lines of its end",
            )
        if status == "timed_out":
            self._must("timeout_s" in spec, f"{step_id} has no time limit")
        return self._by_kind(step_id, spec, state, scope, place, states)

    def _by_kind(
        self,
        step_id: str,
        spec: Document,
        state: Step,
        scope: Scope,
        place: _Place,
        states: Mapping[StepId, Step],
    ) -> _End:
        if "for_each" in spec:
            return self._for_each(step_id, spec, state, scope)
        if "workflow" in spec:
            return self._subworkflow(step_id, spec, state, scope, states)
        if "approval" in spec:
            return self._approval(step_id, spec["approval"], state, scope)
        if "delay_s" in spec:
            return _End(str(state.status))
        end = self._job(step_id, place.item, spec, state, scope)
        if place.has_outputs and end.status == "succeeded":
            self._same(f"output of {step_id}", state.output, end.output)
        return end

    @staticmethod
    def _is_blocked(spec: Document, shown: Mapping[str, StepInScope], place: _Place) -> bool:
        """Whether a step that it needs has ended so that it must not begin."""
        for name in spec.get("needs", ()):
            is_accepted = place.steps[name].get("on_failure") == "continue"
            status = shown[name].status
            if status not in _OK and not (is_accepted and status in _FAILURES):
                return True
        return False

    # ── Kinds of steps ───────────────────────────────────────────────────────────────────────────

    def _job(
        self, step_id: str, index: int | None, spec: Document, state: Step | Item, scope: Scope
    ) -> _End:
        """Judge the attempts of a step or an item; the end that follows from them."""
        name = step_id if index is None else f"{step_id}[{index}]"
        run_id = self._origin(step_id, index, state)
        if run_id is None:
            return _End(str(state.status), state.output)
        given = render(spec.get("input", {}), scope)
        most = spec.get("retry", {}).get("max_attempts", 1)
        self._must(state.attempt <= most, f"{name} was attempted {state.attempt} times of {most}")
        sent: Any = None
        for attempt in range(1, state.attempt + 1):
            job_id = f"{run_id}:{name}@{attempt}"
            sent = handled(self._seed, job_id, spec["topic"], attempt, given)
            if attempt < state.attempt:
                is_retried = isinstance(sent, Fails) and not sent.is_final
                is_late = job_id in self._facts.timed_out
                self._must(is_retried or is_late, f"{name}: attempt {attempt} was repeated")
            if run_id == self._run.id:
                self._dispatched(step_id, index, attempt)
        return self._ended(f"{run_id}:{name}@{state.attempt}", name, state, sent, most)

    def _ended(self, job_id: str, name: str, state: Step | Item, sent: Any, most: int) -> _End:  # noqa: ANN401 - JSON
        status, error = str(state.status), state.error
        if status == "succeeded":
            self._must(not isinstance(sent, Fails), f"{name} succeeded, and its handler raised")
            return _End(status, sent)
        if status == "failed" and error is not None:
            is_last = state.attempt == most
            if error.code == "dead_letter_discarded":
                self._must(job_id in self._facts.discarded, f"{name}: nothing was discarded")
            elif isinstance(sent, Fails) and error.message == sent.message:
                self._must(sent.is_final or is_last, f"{name} failed with attempts left")
            else:
                is_late = job_id in self._facts.timed_out
                self._must(is_late and is_last, f"{name} failed without a reason: {error}")
        return _End(status)

    def _dispatched(self, step_id: str, index: int | None, attempt: int) -> None:
        lines = [
            line
            for line in self._timeline
            if line.what == "job_dispatched" and (line.step, line.item) == (step_id, index)
        ]
        count = sum(line.attempt == attempt for line in lines)
        self._must(count >= 1, f"{step_id} {index}: attempt {attempt} is not in the timeline")

    def _for_each(self, step_id: str, spec: Document, state: Step, scope: Scope) -> _End:
        values = render(spec["for_each"], scope)
        if step_id in self._facts.origins:
            return _End(str(state.status), state.output)
        items = [self._items.get(ItemKey(StepId(step_id), each)) for each in range(len(values))]
        total = None if state.items is None else state.items.total
        self._same(f"number of items of {step_id}", total, len(values))
        outputs: list[Any] = []
        failed: list[int] = []
        for index, (value, item) in enumerate(zip(values, items, strict=True)):
            if item is None:
                self.sentences.append(f"{step_id}[{index}] is not there")
                continue
            inner = scope._replace(item=value, at=index)
            outputs.append(self._item(step_id, index, spec, item, inner))
            if str(item.status) in _FAILURES:
                failed.append(index)
        status = str(state.status)
        if status == "timed_out":
            return _End(status)
        unended = [each for each, item in enumerate(items) if item and not item.status.is_finished]
        self._must(not unended, f"{step_id} has ended before its items {unended}")
        must_fail = bool(failed) and spec.get("on_item_failure") != "continue"
        self._must((status == "failed") == must_fail, f"{step_id} is {status}; failed: {failed}")
        self._same(f"failures of {step_id}", [each.index for each in state.failures], failed)
        if must_fail:
            return _End(status)
        self._same(f"output of {step_id}", state.output, outputs)
        return _End(status, outputs)

    def _item(self, step_id: str, index: int, spec: Document, item: Item, scope: Scope) -> Any:  # noqa: ANN401 - JSON
        """Judge an item; its output."""
        if not item.status.is_finished:
            return None
        if "workflow" not in spec:
            end = self._job(step_id, index, spec, item, scope)
        elif item.dispatch == 0 and not item.steps:
            return item.output  # Kept by a rerun: its steps are in the earlier run.
        else:
            given = render(spec["input"], scope)
            is_stopped = str(item.status) in _STOPPED
            document = DOCUMENTS[spec["workflow"]]
            place = _Place(
                document["steps"],
                f"{step_id}.",
                index,
                given,
                has_outputs=False,
                is_stopped=is_stopped,
            )
            end = self._body(document, item.steps, place)
            if not is_stopped:
                self._same(f"status of {step_id}[{index}]", str(item.status), end.status)
        if str(item.status) == "succeeded":
            self._same(f"output of {step_id}[{index}]", item.output, end.output)
            return end.output
        return None

    def _subworkflow(
        self,
        step_id: str,
        spec: Document,
        state: Step,
        scope: Scope,
        states: Mapping[StepId, Step],
    ) -> _End:
        if step_id in self._facts.origins:
            return _End(str(state.status), state.output)
        given, status = render(spec.get("input", {}), scope), str(state.status)
        document = DOCUMENTS[spec["workflow"]]
        place = _Place(
            document["steps"], f"{step_id}.", None, given, is_stopped=status == "timed_out"
        )
        end = self._body(document, states, place)
        if status == "timed_out":
            return _End(status)
        self._same(f"status of {step_id}", status, end.status)
        self._same(f"output of {step_id}", state.output, end.output)
        return end

    def _approval(self, step_id: str, spec: Document, state: Step, scope: Scope) -> _End:
        status, output = str(state.status), state.output
        if step_id in self._facts.origins:
            return _End(status, output)
        if "message" in spec and state.question is not None:
            self._same(f"question of {step_id}", state.question, render(spec["message"], scope))
        if status == "failed" and output is None:
            self._must(spec.get("on_timeout") == "fail", f"{step_id} failed without a decision")
            return _End(status)
        if not isinstance(output, dict):
            self.sentences.append(f"{step_id} has no decision")
            return _End(status)
        approved = output["approved"]
        self._must((status == "succeeded") == approved, f"{step_id} is {status}: {output}")
        if output["by"] == "system":
            wanted = spec.get("on_timeout", "reject") == "approve"
            self._must("timeout_s" in spec and approved == wanted, f"{step_id} decided by itself")
        elif self._facts.is_sure:
            said = [*self._facts.decisions.get(step_id, ())]
            first = (
                None
                if not said
                else {
                    "approved": said[0].is_approved,
                    "by": said[0].actor,
                    "comment": said[0].comment,
                    "data": said[0].data,
                }
            )
            self._same(f"decision of {step_id}", output, first)
        return _End(status, output)

    # ── The timeline ─────────────────────────────────────────────────────────────────────────────

    def _never_begun(self, status: str) -> None:
        """Check a run that has waited in the queue until its end. A rerun has what it keeps."""
        run = self._run
        begun = {name for name, step in run.steps.items() if step.attempt}
        self._must(not begun or run.rerun_of is not None, f"{begun} have begun")
        code = None if run.error is None else run.error.code
        is_timed_out = status == "timed_out" and code == "queue_timeout"
        is_cancelled = status == "cancelled" and bool(self._facts.cancels)
        self._must(is_timed_out or is_cancelled, f"it is {status} in the queue, with {code}")

    def _check_timeline(self, status: str) -> None:
        whats = [line.what for line in self._timeline]
        self._must(whats[-1:] == [f"run_{status}"], f"its timeline ends with {whats[-1:]}")
        ends = [each for each in whats if each.startswith("run_")]
        begins = [each for each in ends if each in {"run_queued", "run_started"}]
        self._must(len(ends) == len(begins) + 1, f"its timeline has {ends}")
        expected = (["run_queued", "run_started"], ["run_started"], ["run_queued"])
        self._must(begins in expected and whats[:1] == begins[:1], f"its timeline has {whats[:2]}")

    # ── Sentences ────────────────────────────────────────────────────────────────────────────────

    def _origin(self, step_id: str, index: int | None, state: Step | Item) -> str | None:
        """The run that a result is from; ``None`` if that is not known."""
        if step_id in self._facts.origins:
            return self._facts.origins[step_id]
        if index is not None and self._run.rerun_of is not None and state.dispatch == 0:
            return None
        return self._run.id

    def _must(self, holds: bool, sentence: str) -> None:  # noqa: FBT001 - the fact
        if not holds:
            self.sentences.append(f"{self._run.workflow_id} {self._run.id}: {sentence}")

    def _same(self, what: str, found: object, expected: object) -> None:
        self._must(found == expected, f"{what} is {found!r}, and must be {expected!r}")


def render(value: object, scope: Scope) -> Any:  # noqa: ANN401 - JSON
    """The value of a part of a document."""
    match value:
        case Means(_, meaning):
            return meaning(scope)
        case dict():
            return {name: render(each, scope) for name, each in value.items()}
        case list():
            return [render(each, scope) for each in value]
        case _:
            return value


# ── What happened ────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class MeaningRecord:
    """Collects the facts of runs, and judges each when it ends."""

    ledger: Ledger
    seed: int
    _cancels: Counter[str] = field(default_factory=Counter)
    _decisions: defaultdict[tuple[str, str], list[Decision]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _discarded: set[str] = field(default_factory=set)
    _timed_out: set[str] = field(default_factory=set)
    _origins: dict[str, dict[str, str]] = field(default_factory=dict)
    """By run: the steps that it keeps, and the run that each is from."""

    def watch(self) -> None:
        """Observe the store."""
        self.ledger.on("post", self._posted)
        self.ledger.on("expire_jobs", self._expired)
        self.ledger.on("discard_dead_letter", self._letter_discarded)
        for verb in ("commit", "settle"):
            self.ledger.on(verb, self._committed)

    def _posted(self, seen: SeenCommand) -> None:
        run_id, event = seen.arguments[:2]
        if seen.answer is not PostAnswer.POSTED:
            return
        if isinstance(event, CancelRequested):
            self._cancels[run_id] += 1
        elif isinstance(event, Approved | Rejected):
            is_approved = isinstance(event, Approved)
            decision = Decision(is_approved, event.actor, event.comment, event.data)
            self._decisions[run_id, event.step_id].append(decision)

    def _expired(self, seen: SeenCommand) -> None:
        self._timed_out.update(each.job_id for each in seen.answer if each.is_timed_out)

    def _letter_discarded(self, seen: SeenCommand) -> None:
        if seen.answer is not None:
            self._discarded.add(str(seen.arguments[0]).removeprefix("job:").rpartition("#")[0])

    def _committed(self, seen: SeenCommand) -> None:
        run_id = seen.arguments[-1].run_id
        file = self.ledger.store.real.state.runs.get(run_id)
        if isinstance(seen.answer, Committed) and file is not None and file.run.status.is_finished:
            self.judge(file)

    def judge(self, file: RunFile) -> None:
        """Check a run that has ended."""
        run = file.run
        facts = RunIncidents(
            cancels=self._cancels[run.id],
            decisions={
                step_id: said
                for (run_id, step_id), said in self._decisions.items()
                if run_id == run.id
            },
            discarded=self._discarded,
            timed_out=self._timed_out,
            origins=self._kept(file),
            is_sure=not self.ledger.has_failed_over,
        )
        oracle = RunOracle(self.seed, run, file.items, file.timeline, facts)
        self.ledger.history.check("runs give what they mean", oracle.judge())

    def _kept(self, file: RunFile) -> dict[str, str]:
        """The steps that a rerun keeps, each with the run that has executed it."""
        run = file.run
        kept: dict[str, str] = {}
        if run.rerun_of is not None:
            before = self._origins.get(run.rerun_of, {})
            for line in file.timeline:
                if line.what == "step_reused" and line.step is not None:
                    kept[line.step] = before.get(line.step, run.rerun_of)
        self._origins[run.id] = kept
        return kept


# ── What callers were told ───────────────────────────────────────────────────────────────────────


def check_told(world: World) -> None:
    """Compare what callers were shown of ended runs, and told of reruns, with what is stored."""
    runs, check = world.store.real.state.runs, world.history.check
    for callers in world.callers:
        for key, sentence in callers.mismatched.items():
            check("a key belongs to its input", [f"{key}: {sentence}"] if sentence else [])
        for run_id, (view, lines) in callers.read.items():
            file = runs.get(RunId(run_id))
            if file is not None:
                check("callers are shown what is stored", _shown_otherwise(file, view, lines))
        for (run_id, step_id), rows in callers.rows.items():
            file = runs.get(RunId(run_id))
            if file is not None:
                kept = {
                    key.item: item.output
                    for key, item in file.items.items()
                    if key.step_id == step_id
                }
                said = f"{run_id}: the items of {step_id} are {kept}, and a caller got {rows}"
                check("callers are shown what is stored", [said] if dict(rows) != kept else [])
        _check_reruns(world, callers)


def _check_reruns(world: World, callers: Callers) -> None:
    runs, check = world.store.real.state.runs, world.history.check
    for run_id, plan in callers.plans:
        file = runs.get(RunId(run_id))
        if file is not None:
            check("a rerun keeps what it must", planned_otherwise(file, plan))
    for run_id, told in callers.reruns.items():
        new, old = runs.get(RunId(run_id)), runs.get(RunId(told.of))
        if new is not None and old is not None:
            check("a rerun keeps what it must", rerun_keeps(old, new, told))
    for run_id, of in callers.item_reruns.items():
        new, old = runs.get(RunId(run_id)), runs.get(RunId(of))
        if new is not None and old is not None and not world.ledger.has_failed_over:
            check("a rerun keeps what it must", items_run_again(old, new))


def _shown_otherwise(file: RunFile, view: RunView, lines: Sequence[TimelineLine]) -> Iterator[str]:
    run = file.run
    stored = [(each.what, each.step, each.item, each.attempt) for each in file.timeline]
    shown = [(each.what, each.step, each.item, each.attempt) for each in lines]
    if stored != shown:
        yield f"{run.id}: its timeline is {stored}, and a caller got {shown}"
    if (view.status, view.output, view.input) != (run.status, run.output, run.input):
        yield f"{run.id}: it is {run.status} {run.output}, not {view.status} {view.output}"
    states = {name: (str(step.status), step.output) for name, step in run.steps.items()}
    told = {name: (str(step.status), step.output) for name, step in view.steps.items()}
    for name, state in states.items():
        if told.get(name) != state:
            yield f"{run.id}: {name} is {state}, and a caller got {told.get(name)}"


def rerun_keeps(old: RunFile, new: RunFile, told: RerunTold) -> Iterator[str]:
    """A rerun from a step repeats it, what depends on it, and what had not succeeded."""
    steps: Document = DOCUMENTS.get(old.run.workflow_id, {"steps": {}})["steps"]
    again = {told.from_step}
    for name, spec in steps.items():
        status = str(old.run.step(StepId(name)).status)
        is_accepted = spec.get("on_failure") == "continue" and status in _FAILURES
        if again.intersection(spec.get("needs", ())) or not (status in _OK or is_accepted):
            again.add(name)
    must_keep = steps.keys() - again
    kept = {line.step for line in new.timeline if line.what == "step_reused"}
    # A rerun that was given up in the queue has kept nothing yet.
    has_begun = any(line.what == "run_started" for line in new.timeline)
    for where, names in (("keeps", kept), ("was to keep", told.reused)):
        found = {name for name in names if name in steps}
        if found != must_keep and (where != "keeps" or has_begun):
            yield f"{new.run.id} from {told.from_step} {where} {sorted(found)}, not {must_keep}"


def items_run_again(old: RunFile, new: RunFile) -> Iterator[str]:
    """A rerun of failed items runs none that had succeeded, if what they build on was kept."""
    steps: Document = DOCUMENTS.get(old.run.workflow_id, {"steps": {}})["steps"]
    reused = {line.step for line in new.timeline if line.what == "step_reused"}
    begun = [line for line in new.timeline if line.what == "job_dispatched"]
    for name, spec in steps.items():
        if "for_each" not in spec or not reused.issuperset(spec.get("needs", ())):
            continue
        again = {
            line.item for line in begun if line.step is not None and line.step.split(".")[0] == name
        }
        kept = {
            key.item
            for key, item in old.items.items()
            if key.step_id == name and item.status is StepStatus.SUCCEEDED
        }
        if kept & again:
            yield f"{new.run.id}: items {sorted(kept & again)} of {name} succeeded and ran again"


def planned_otherwise(old: RunFile, plan: RerunPlan) -> Iterator[str]:
    """A step is skipped again if it was; items are kept that had succeeded."""
    for name, step in plan.steps.items():
        state = old.run.step(StepId(name))
        if step.action != "runs_again" and (step.action == "skipped") != (
            state.status is StepStatus.SKIPPED
        ):
            yield f"{old.run.id}: {name} was {state.status}, and a rerun plans: {step.action}"
        if step.items_reused is None or state.items is None:
            continue
        items = [item for key, item in old.items.items() if key.step_id == name]
        good = sum(item.status is StepStatus.SUCCEEDED for item in items)
        kept = good if step.action == "runs_again" else state.items.total
        counts, expected = (step.items_reused, step.items_run_again), state.items.total - kept
        if counts != (kept, expected):
            yield f"{old.run.id}: a rerun of {name} plans {counts}, not {(kept, expected)}"
