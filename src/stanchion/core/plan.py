"""Plans: workflows that are linked and compiled.

``link`` expands every sub-workflow into namespaced steps (``publish.render``), builds the
dependency graph in both directions, and compiles every expression once. The workflow of a for-each
becomes a plan of its own, which every item follows. A run is planned with the
newest version of each workflow when it starts, and keeps these versions.

Where a tenant's own workflow names another one, that is its own or, if it has none, the shared one.
The sub-workflows of a shared workflow are shared ones, so one plan of it serves all tenants.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, assert_never

import msgspec

from stanchion.core import graph, limits
from stanchion.core.expression import (
    Expression,
    Template,
    compile_expression,
    compile_template,
    template_tokens,
    tokens_in,
)
from stanchion.core.faults import Fault, WorkflowFaults
from stanchion.core.lease import LeaseOverride
from stanchion.core.model import (
    Risk,
    StepId,
    StepStatus,
    WorkflowId,
    WorkflowSource,
    shared_name,
    split_name,
)
from stanchion.core.schema import InputSchema, compile_schema
from stanchion.core.workflow import (
    RUN_TIMEOUT_S_DEFAULT,
    ApprovalSpec,
    DelaySpec,
    ForEachSpec,
    ForEachWorkflowSpec,
    JobSpec,
    OnFailure,
    StepSpec,
    SubworkflowSpec,
    Workflow,
)

_SCOPE = frozenset({"input", "steps"})
_ITEM_SCOPE = _SCOPE | {"item", "index"}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PlannedStep:
    """One step, linked and compiled."""

    id: StepId
    spec: StepSpec
    parent: StepId | None
    needs: tuple[StepId, ...]
    dependants: tuple[StepId, ...]
    visible: Mapping[str, StepId]
    """The steps that its expressions may read, by their name in the file: those it depends on."""
    condition: Expression | None = None
    input: Template | None = None
    """What its job, its sub-workflow or, as the message, its approval is given."""
    items: Template | None = None
    timeout_s: float | None = None
    max_deliveries: int | None = None
    data_schema: InputSchema | None = None
    """For an approval: what the data of a decision must look like."""
    body: Body | None = None
    """For a sub-workflow step: the inner workflow."""
    item_plan: Plan | None = None
    """For a for-each with a workflow: the plan of each item."""
    item_timeout_s: float | None = None
    """For a for-each with a workflow: the time limit of each item."""

    def is_satisfied_by(self, status: StepStatus) -> bool:
        """Whether steps that need this one may begin when it has ended with this status.

        A step that was cancelled because another one failed does not satisfy, whatever its own
        ``on_failure``: that is about failures of the step itself.
        """
        return status.satisfies_needs or (
            status.is_failure and self.spec.on_failure is OnFailure.CONTINUE
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Body:
    """The steps of a workflow, its output template and its input schema."""

    steps: tuple[StepId, ...]
    leaves: Mapping[str, StepId]
    """The steps that no other step needs, by their name in the file."""
    visible: Mapping[str, StepId]
    output: Template | None
    schema: InputSchema | None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, weakref_slot=True)
class Plan:
    """All steps of a run, in the order in which they are considered."""

    workflow_id: WorkflowId
    steps: Mapping[StepId, PlannedStep]
    body: Body
    risk: Risk
    """The strictest risk class of its workflows."""
    lock_policy: LeaseOverride | None
    timeout_s: float
    budget: Mapping[str, int] = field(default_factory=dict)
    """What a run of it reserves, from the workflow itself and not from its sub-workflows."""
    item_steps: Mapping[StepId, StepId] = field(default_factory=dict)
    """The steps of item plans, each with the for-each step that has it."""


def link(
    workflow: Workflow,
    others: Mapping[WorkflowId, Workflow],
    *,
    source: WorkflowSource = WorkflowSource.OWN,
) -> Plan | WorkflowFaults:
    """Make a plan, or return all faults that prevent it.

    ``workflow`` and ``others`` are parsed, so each is valid by itself. The faults are in their
    combination: an unknown name, a cycle, too many levels, too many steps. In ``others``, shared
    workflows have their ``shared_name``.
    """
    name = workflow.id if source is WorkflowSource.OWN else shared_name(workflow.id)
    linking = _Linking({**others, name: workflow})
    body = linking.unfold(workflow, parent=None, trail=(name,))
    if linking.count > limits.PLAN_STEPS_MAX:
        linking.fault(
            "steps",
            f"{linking.count} steps with all sub-workflows unfolded;"
            f" at most {limits.PLAN_STEPS_MAX} are allowed",
        )
    if linking.tokens > limits.PLAN_TOKENS_MAX:
        linking.fault(
            "steps",
            "the expressions of all sub-workflows have more than"
            f" {limits.PLAN_TOKENS_MAX} words and signs together",
        )
    if linking.faults:
        return WorkflowFaults(tuple(linking.faults))
    return Plan(
        workflow_id=workflow.id,
        steps=linking.steps,
        body=body,
        risk=max(linking.risks, key=lambda risk: risk.rank),
        lock_policy=workflow.lock_policy,
        timeout_s=workflow.timeout_s or RUN_TIMEOUT_S_DEFAULT,
        budget=workflow.budget,
        item_steps=linking.item_steps,
    )


def link_known(
    workflow: Workflow, others: Mapping[WorkflowId, Workflow]
) -> tuple[Plan | WorkflowFaults, frozenset[WorkflowId]]:
    """Link a workflow whose sub-workflows are not all known, and name those that are not.

    Each unknown one counts as a workflow of one step.
    """
    reached, unknown = {workflow.id}, set[WorkflowId]()
    wanted = set(subworkflows(workflow))
    while wanted:
        name = wanted.pop()
        if name in reached:
            continue
        reached.add(name)
        if name in others:
            wanted |= subworkflows(others[name])
        else:
            unknown.add(name)
    stand_ins = {
        name: Workflow(id=name, steps={StepId("unknown"): DelaySpec(delay_s=0)}) for name in unknown
    }
    return link(workflow, {**others, **stand_ins}), frozenset(unknown)


def child_name(
    workflow_id: WorkflowId, *, within: WorkflowId, known: Container[WorkflowId]
) -> WorkflowId:
    """The name of the workflow that the workflow ``within`` means by an id.

    ``known`` are the names that there are: an own workflow comes before the shared one.
    """
    shared = shared_name(workflow_id)
    if split_name(within)[0] is WorkflowSource.SHARED:
        return shared
    return shared if workflow_id not in known and shared in known else workflow_id


def subworkflows(workflow: Workflow) -> frozenset[WorkflowId]:
    """The workflows that this one names directly."""
    return frozenset(
        spec.workflow
        for spec in workflow.steps.values()
        if isinstance(spec, SubworkflowSpec | ForEachWorkflowSpec)
    )


@dataclass(slots=True)
class _Linking:
    others: Mapping[WorkflowId, Workflow]
    steps: dict[StepId, PlannedStep] = field(default_factory=dict)
    risks: list[Risk] = field(default_factory=list)
    tokens: int = 0
    """Tokens of all expressions so far: what compiling them costs."""
    faults: list[Fault] = field(default_factory=list)
    item_steps: dict[StepId, StepId] = field(default_factory=dict)
    around: PlannedStep | None = None
    """The for-each step, while the plan of its items is linked."""

    @property
    def count(self) -> int:
        """The number of steps so far, those of items included."""
        return len(self.steps) + len(self.item_steps)

    def fault(self, path: str, message: str) -> None:
        self.faults.append(Fault(path, message))

    def unfold(
        self,
        workflow: Workflow,
        *,
        parent: StepId | None,
        trail: tuple[WorkflowId, ...],
        max_deliveries: int | None = None,
    ) -> Body:
        self.risks.append(workflow.risk)
        max_deliveries = workflow.max_deliveries or max_deliveries
        ids = {local: _namespaced(parent, local) for local in workflow.steps}
        needs = {local: spec.needs for local, spec in workflow.steps.items()}
        before = graph.ancestors(needs)
        after = graph.dependants(needs)
        self.tokens += 0 if workflow.output is msgspec.UNSET else template_tokens(workflow.output)
        for local, spec in workflow.steps.items():
            self.tokens += _tokens(spec)
            if self.tokens > limits.PLAN_TOKENS_MAX:
                break  # over the limit: compiling the rest would take long and not be used
            # Inserted first, so that a step precedes its inner steps in the order of the plan.
            planned = _planned(
                spec,
                step_id=ids[local],
                parent=parent,
                needs=tuple(ids[need] for need in spec.needs),
                dependants=tuple(ids[later] for later in after[local]),
                visible={name: ids[name] for name in workflow.steps if name in before[local]},
                max_deliveries=max_deliveries,
            )
            self.steps[planned.id] = planned
            if self.around is not None and isinstance(spec, _NOT_IN_ITEMS):
                self.fault(
                    f"steps.{self.around.id}.workflow",
                    f"workflow '{workflow.id}' has {_NOUNS[type(spec)]}, '{local}':"
                    " there can be none inside a for_each",
                )
            elif isinstance(spec, SubworkflowSpec | ForEachWorkflowSpec):
                self._unfold_below(planned, spec, trail)
        return Body(
            steps=tuple(ids.values()),
            leaves={local: ids[local] for local in workflow.steps if not after[local]},
            visible={str(local): step_id for local, step_id in ids.items()},
            output=None
            if workflow.output is msgspec.UNSET or self.tokens > limits.PLAN_TOKENS_MAX
            else compile_template(workflow.output, names=_SCOPE),
            schema=None if workflow.input_schema is None else compile_schema(workflow.input_schema),
        )

    def _unfold_below(
        self,
        planned: PlannedStep,
        spec: SubworkflowSpec | ForEachWorkflowSpec,
        trail: tuple[WorkflowId, ...],
    ) -> None:
        path = f"steps.{planned.id}.workflow"
        name = child_name(spec.workflow, within=trail[-1], known=self.others)
        child = self.others.get(name)
        if name in trail:
            circle = " → ".join(split_name(each)[1] for each in (*trail[trail.index(name) :], name))
            self.fault(path, f"workflows contain each other in a circle: {circle}")
        elif child is None:
            kind = "shared workflow" if name != spec.workflow else "workflow"
            self.fault(path, f"there is no {kind} '{spec.workflow}'")
        elif len(trail) > limits.SUBWORKFLOW_DEPTH_MAX:
            self.fault(
                path, f"sub-workflows are nested deeper than {limits.SUBWORKFLOW_DEPTH_MAX} levels"
            )
        elif self.count > limits.PLAN_STEPS_MAX:
            pass  # Stop expanding at the limit: five levels of 200 steps would take too long.
        elif isinstance(spec, ForEachWorkflowSpec):
            self._plan_items(planned, child, (*trail, name))
        else:
            body = self.unfold(
                child,
                parent=planned.id,
                trail=(*trail, name),
                max_deliveries=planned.max_deliveries,
            )
            timeout_s = spec.timeout_s or child.timeout_s
            self.steps[planned.id] = replace(planned, body=body, timeout_s=timeout_s)

    def _plan_items(
        self, planned: PlannedStep, child: Workflow, trail: tuple[WorkflowId, ...]
    ) -> None:
        """Link the workflow of a for-each's items into a plan of its own, with all its steps."""
        inside = _Linking(self.others, tokens=self.tokens, around=planned)
        body = inside.unfold(
            child, parent=planned.id, trail=trail, max_deliveries=planned.max_deliveries
        )
        self.faults += inside.faults
        self.tokens = inside.tokens
        self.risks += inside.risks
        self.item_steps |= dict.fromkeys(inside.steps, planned.id)
        plan = Plan(
            workflow_id=child.id,
            steps=inside.steps,
            body=body,
            risk=child.risk,
            lock_policy=None,
            timeout_s=RUN_TIMEOUT_S_DEFAULT,
        )
        self.steps[planned.id] = replace(planned, item_plan=plan, item_timeout_s=child.timeout_s)


_NOT_IN_ITEMS: Final = (ApprovalSpec, ForEachSpec, ForEachWorkflowSpec)
_NOUNS: Final[Mapping[type[object], str]] = MappingProxyType(
    {
        ApprovalSpec: "an approval step",
        ForEachSpec: "a for_each step",
        ForEachWorkflowSpec: "a for_each step",
    }
)


def _tokens(spec: StepSpec) -> int:
    total = 0 if spec.when is None else tokens_in(spec.when)
    match spec:
        case JobSpec() | SubworkflowSpec():
            return total + template_tokens(spec.input)
        case ForEachSpec() | ForEachWorkflowSpec():
            return total + template_tokens(spec.input) + template_tokens(spec.for_each)
        case ApprovalSpec():
            return total + template_tokens(spec.message)
        case DelaySpec():
            return total
        case _:
            assert_never(spec)


def _namespaced(parent: StepId | None, local: str) -> StepId:
    return StepId(local if parent is None else f"{parent}.{local}")


def _planned(
    spec: StepSpec,
    *,
    step_id: StepId,
    parent: StepId | None,
    needs: tuple[StepId, ...],
    dependants: tuple[StepId, ...],
    visible: Mapping[str, StepId],
    max_deliveries: int | None,
) -> PlannedStep:
    template: Template | None = None
    items: Template | None = None
    timeout_s: float | None = None
    data_schema: InputSchema | None = None
    match spec:
        case JobSpec() | SubworkflowSpec():
            template = compile_template(spec.input, names=_SCOPE)
            timeout_s = spec.timeout_s
        case ForEachSpec() | ForEachWorkflowSpec():
            template = compile_template(spec.input, names=_ITEM_SCOPE)
            items = compile_template(spec.for_each, names=_SCOPE)
            timeout_s = spec.timeout_s
        case ApprovalSpec():
            if spec.message is not None:
                template = compile_template(spec.message, names=_SCOPE)
            if spec.data_schema is not None:
                data_schema = compile_schema(spec.data_schema)
            timeout_s = spec.timeout_s
        case DelaySpec():
            pass
        case _:
            assert_never(spec)
    condition = (
        None if spec.when is None else compile_expression(spec.when, names=_SCOPE, want_bool=True)
    )
    return PlannedStep(
        id=step_id,
        spec=spec,
        parent=parent,
        needs=needs,
        dependants=dependants,
        visible=visible,
        condition=condition,
        input=template,
        items=items,
        timeout_s=timeout_s,
        max_deliveries=max_deliveries,
        data_schema=data_schema,
    )
