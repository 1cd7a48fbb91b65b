"""Plans: links workflows into plans, and caches the plans.

A version of a workflow never changes, so a plan is cached by versions and shared by all runs that
began with them; a plan of shared workflows by all tenants. The version in force does change: the
cached one may be old, and then the store refuses the start (``StaleDefinition``).
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, TypeAlias, TypeVar

import msgspec

from stanchion.core.faults import WorkflowFaults
from stanchion.core.lease import Moment
from stanchion.core.model import (
    Run,
    StepId,
    TenantId,
    Topic,
    WorkflowId,
    WorkflowSource,
    shared_name,
    split_name,
)
from stanchion.core.plan import Plan, link, subworkflows
from stanchion.core.workflow import ForEachSpec, ForEachWorkflowSpec, JobSpec, Workflow
from stanchion.ports.records import RunSummary, StartTerms
from stanchion.ports.store import Definitions
from stanchion.services.limiter import CoalescedRead
from stanchion.services.work import TenantExecutor

KEPT_MAX: Final = 50_000
"""Cached workflow names of all tenants. Each costs little: equal workflows share one plan."""
PLANS_MAX: Final = 2_000
PLANS_TEXT_BYTES_MAX: Final = 4 * 1024 * 1024
"""Text of the workflows of all cached plans. A plan takes about 15 times as much memory, or 150
times if there is little but expressions in it."""
TENANT_TEXT_BYTES_MAX: Final = PLANS_TEXT_BYTES_MAX // 4
"""The same for the workflows of one tenant."""
IDLE_TEXT_BYTES_MAX: Final = 256 * 1024
"""The same for plans that were not used for a minute."""
PLAN_KEPT_MS: Final = 60_000
DEFINITIONS_MAX: Final = 500
"""Workflows that one plan may contain; more do not fit into the maximum number of steps."""

_ALL_TENANTS: Final = TenantId("*")
"""Stands for the tenant when a shared workflow is linked. No tenant has this name."""
JOB_STEP: Final = StepId("job")
_JOB_PREFIX: Final = "job/"
"""No workflow of a tenant can have such an id: a slash is not allowed in workflow ids."""

Linker: TypeAlias = Callable[
    [Workflow, Mapping[WorkflowId, Workflow], WorkflowSource], Awaitable[Plan | WorkflowFaults]
]


class Linked(msgspec.Struct, frozen=True):
    """A plan, and the versions it was made from."""

    plan: Plan
    version: int
    definitions: dict[WorkflowId, int]
    """Versions of the workflow and of all workflows it contains, as in ``Admission``."""
    source: WorkflowSource = WorkflowSource.OWN
    uses: dict[WorkflowId, int] = {}
    """Versions of the workflows it contains, as in ``Run``."""
    terms: StartTerms = StartTerms()
    """What the store checks of its starts while the tenant is full."""


class UnknownWorkflow(msgspec.Struct, frozen=True):
    """The tenant has no such workflow."""

    workflow_id: WorkflowId


_Named: TypeAlias = tuple[TenantId, WorkflowId]
_Newest: TypeAlias = "Linked | UnknownWorkflow | WorkflowFaults"


class DefinitionMissing(RuntimeError):
    """A workflow version that a run needs is not in the store any more."""


def is_single_job(run: Run | RunSummary) -> bool:
    """Whether the run is a job that was submitted alone."""
    return run.workflow_id.startswith(_JOB_PREFIX)


async def link_here(
    workflow: Workflow, others: Mapping[WorkflowId, Workflow], source: WorkflowSource
) -> Plan | WorkflowFaults:
    """Link in the current thread."""
    return link(workflow, others, source=source)


class _KeptPlan(msgspec.Struct):
    plan: Plan
    tenant: TenantId
    text_bytes: int
    names: set[_Named] = set()
    """What it is the newest plan of."""
    is_used: bool = True
    """Whether it was used since idle plans were last looked for."""
    idle_since: Moment = Moment(0)


class _PlanCache:
    """Plans by the content of their workflows, least recently used first.

    Workflows that a tenant stores again and again, each a little different, would take gigabytes
    by the number of plans alone. So their text is counted, and a tenant over its share has its own
    plans dropped.
    """

    def __init__(self, on_dropped: Callable[[_KeptPlan], None]) -> None:
        self._on_dropped = on_dropped
        self._kept: OrderedDict[bytes, _KeptPlan] = OrderedDict()
        self._text_bytes: Counter[TenantId] = Counter()
        self._total_bytes = 0

    def get(self, content: bytes) -> _KeptPlan | None:
        """A plan that is about to be used."""
        found = self._kept.get(content)
        if found is not None:
            found.is_used = True
            self._kept.move_to_end(content)
        return found

    def drop_idle(self, now: Moment) -> None:
        """Drop plans that were not used for a minute, if they take much memory together."""
        idle = []
        for content, kept in self._kept.items():
            if kept.is_used:
                kept.is_used, kept.idle_since = False, now
            elif now - kept.idle_since >= PLAN_KEPT_MS:
                idle.append((content, kept))
        idle_bytes = sum(kept.text_bytes for _, kept in idle)
        for content, kept in idle:
            if idle_bytes <= IDLE_TEXT_BYTES_MAX:
                break
            idle_bytes -= kept.text_bytes
            self._drop(content)

    def put(self, content: bytes, kept: _KeptPlan) -> None:
        """Keep a plan, and drop what there is no room for then."""
        self._drop(content)
        self._kept[content] = kept
        self._text_bytes[kept.tenant] += kept.text_bytes
        self._total_bytes += kept.text_bytes
        own_max = PLANS_TEXT_BYTES_MAX if kept.tenant == _ALL_TENANTS else TENANT_TEXT_BYTES_MAX
        if self._text_bytes[kept.tenant] > own_max:
            for each in [key for key, other in self._kept.items() if other.tenant == kept.tenant]:
                if each == content or self._text_bytes[kept.tenant] <= own_max:
                    break
                self._drop(each)
        while len(self._kept) > 1 and (
            len(self._kept) > PLANS_MAX or self._total_bytes > PLANS_TEXT_BYTES_MAX
        ):
            self._drop(next(iter(self._kept)))

    def _drop(self, content: bytes) -> None:
        dropped = self._kept.pop(content, None)
        if dropped is None:
            return
        self._total_bytes -= dropped.text_bytes
        self._text_bytes[dropped.tenant] -= dropped.text_bytes
        if not self._text_bytes[dropped.tenant]:
            del self._text_bytes[dropped.tenant]
        self._on_dropped(dropped)


class Plans:
    """Links workflows and caches the plans."""

    def __init__(
        self,
        definitions: Definitions,
        *,
        linker: Linker = link_here,
        executor: TenantExecutor | None = None,
    ) -> None:
        """With an executor, plans are linked by it: many expressions take long to compile."""
        self._definitions = definitions
        self._link = linker
        self._executor = executor
        self._newest: OrderedDict[_Named, tuple[Linked, bytes]] = OrderedDict()
        """The newest plans, each with its content."""
        self._by_version: OrderedDict[object, bytes] = OrderedDict()
        """The contents of plans."""
        self._by_content = _PlanCache(self._forget_names)
        self._jobs: OrderedDict[Topic, Linked] = OrderedDict()
        self._linking: CoalescedRead[bytes, Plan | WorkflowFaults] = CoalescedRead()
        self._reading: CoalescedRead[tuple[TenantId, WorkflowId], _Newest] = CoalescedRead()

    async def newest(
        self, tenant: TenantId, workflow_id: WorkflowId, *, refresh: bool = False
    ) -> _Newest:
        """The plan of the newest versions, from the cache; ``refresh`` reads the store."""
        if refresh:
            return await self._read_newest(tenant, workflow_id)
        key = (tenant, workflow_id)
        is_later = False
        while True:
            known = self._newest.get(key)
            if known is not None:
                self._newest.move_to_end(key)
                self._by_content.get(known[1])
                return known[0]
            if not self._reading.is_under_way(key):
                return await self._reading.read(key, lambda: self._read_newest(*key))
            # A read that began before this call may return a plan, because the store checks its
            # versions at admission; for a refusal, a read that begins later is needed.
            found = await self._reading.found(key)
            if isinstance(found, Linked) or (is_later and found is not None):
                return found
            is_later = True

    def may_begin_items(self, tenant: TenantId, workflow_id: WorkflowId) -> bool:
        """Whether a run of the plan in the cache, if there is one, may begin a for-each."""
        known = self._newest.get((tenant, workflow_id))
        return known is None or any(
            isinstance(step.spec, ForEachSpec | ForEachWorkflowSpec)
            for step in known[0].plan.steps.values()
        )

    def first_steps(self, tenant: TenantId, workflow_id: WorkflowId) -> int | None:
        """How many steps of the plan in the cache wait for no other; ``None`` if there is none."""
        known = self._newest.get((tenant, workflow_id))
        if known is None:
            return None
        return max(1, sum(not step.needs for step in known[0].plan.steps.values()))

    async def _read_newest(self, tenant: TenantId, workflow_id: WorkflowId) -> _Newest:
        key = (tenant, workflow_id)
        found, definitions = await self._gather(tenant, workflow_id)
        name = workflow_id if workflow_id in found else shared_name(workflow_id)
        if name not in found:
            self._newest.pop(key, None)
            return UnknownWorkflow(workflow_id)
        versions = {each: definitions[each] for each in found}
        kept = await self._plan(tenant, name, versions, found)
        if isinstance(kept, WorkflowFaults):
            return kept
        plan, content = kept
        uses = {each: version for each, version in versions.items() if each != name}
        terms = StartTerms(definitions, dict(plan.budget))
        linked = Linked(plan, versions[name], definitions, split_name(name)[0], uses, terms)
        in_cache = self._by_content.get(content)
        if in_cache is not None:
            in_cache.names.add(key)
            _keep(self._newest, key, (linked, content))
        return linked

    def forget_idle(self, now: Moment) -> None:
        """Drop plans that were not used for a minute. To be called every few seconds."""
        self._by_content.drop_idle(now)

    def _forget_names(self, dropped: _KeptPlan) -> None:
        for key in dropped.names:
            known = self._newest.get(key)
            if known is not None and known[0].plan is dropped.plan:
                del self._newest[key]

    def forget(self, tenant: TenantId, workflow_id: WorkflowId) -> None:
        """Drop the cached newest plans that contain a workflow: a new version was written."""
        for key, (linked, _) in list(self._newest.items()):
            if key[0] == tenant and workflow_id in linked.definitions:
                del self._newest[key]

    async def of_run(self, run: Run) -> Plan:
        """The plan that the run began with. Raises ``DefinitionMissing`` and ``BackendError``."""
        if is_single_job(run):
            return self.of_job(Topic(run.workflow_id.removeprefix(_JOB_PREFIX))).plan
        name, versions = run.workflow_name, run.definitions
        known = self._known(_version_key(run.tenant, name, versions))
        if known is not None:
            return known[0]
        found: dict[WorkflowId, Workflow] = {}
        for each, version in versions.items():
            source, workflow_id = split_name(each)
            stored = await self._definitions.workflow(
                run.tenant, workflow_id, version=version, source=source
            )
            if stored is not None:
                found[each] = stored.workflow
        plan = await self._plan(run.tenant, name, versions, found)
        if isinstance(plan, WorkflowFaults):
            raise DefinitionMissing(f"run '{run.id}' cannot be linked any more: {plan.faults[0]}")
        return plan[0]

    def _known(self, version_key: object) -> tuple[Plan, bytes] | None:
        content = self._by_version.get(version_key)
        kept = None if content is None else self._by_content.get(content)
        return None if content is None or kept is None else (kept.plan, content)

    def of_job(self, topic: Topic) -> Linked:
        """The plan of a job that was submitted alone: one step, no slot."""
        known = self._jobs.get(topic)
        if known is None:
            spec = JobSpec(topic=topic, input="${input.input}")
            workflow = Workflow(id=WorkflowId(_JOB_PREFIX + topic), steps={JOB_STEP: spec})
            plan = link(workflow, {})
            assert isinstance(plan, Plan)
            known = Linked(plan, 1, {})
            _keep(self._jobs, topic, known, PLANS_MAX)
        return known

    async def _plan(
        self,
        tenant: TenantId,
        name: WorkflowId,
        versions: Mapping[WorkflowId, int],
        found: Mapping[WorkflowId, Workflow],
    ) -> tuple[Plan, bytes] | WorkflowFaults:
        """A plan and its content."""
        key = _version_key(tenant, name, versions)
        known = self._known(key)
        if known is not None:
            return known
        source, workflow_id = split_name(name)
        if name not in found:
            raise DefinitionMissing(f"workflow '{workflow_id}' is not in the store any more")
        workflows = {each: found[each] for each in sorted(found)}
        # Tenants with equal workflows share one plan: a plan does not name its tenant.
        content, text_bytes = _content(name, workflows)
        kept = self._by_content.get(content)
        if kept is None:
            is_shared = source is WorkflowSource.SHARED
            # After a change, the next starts of all tenants need the same new plan. One links it,
            # in a turn of its own: a tenant with much waiting must not hold up the others.
            while is_shared and self._linking.is_under_way(content):
                joined = await self._linking.found(content)
                if isinstance(joined, WorkflowFaults):
                    return joined
                if joined is not None:
                    return joined, content
            if is_shared:
                linked = await self._linking.read(
                    content, lambda: self._linked(_ALL_TENANTS, workflows[name], workflows, source)
                )
            else:
                linked = await self._linked(tenant, workflows[name], workflows, source)
            if isinstance(linked, WorkflowFaults):
                return linked
            kept = _KeptPlan(linked, _ALL_TENANTS if is_shared else tenant, text_bytes)
            self._by_content.put(content, kept)
        _keep(self._by_version, key, content)
        return kept.plan, content

    async def _linked(
        self,
        tenant: TenantId,
        workflow: Workflow,
        workflows: Mapping[WorkflowId, Workflow],
        source: WorkflowSource,
    ) -> Plan | WorkflowFaults:
        if self._executor is None:
            return await self._link(workflow, workflows, source)
        return await self._executor.run(
            tenant, lambda: link(workflow, workflows, source=source), may_refuse=False
        )

    async def _gather(
        self, tenant: TenantId, workflow_id: WorkflowId
    ) -> tuple[dict[WorkflowId, Workflow], dict[WorkflowId, int]]:
        """Read the workflow in force and all it contains, and what an admission must compare."""
        found: dict[WorkflowId, Workflow] = {}
        definitions: dict[WorkflowId, int] = {}
        asked: set[WorkflowId] = set()
        wanted = {workflow_id}
        while wanted and len(found) < DEFINITIONS_MAX:
            named: set[WorkflowId] = set()
            asked |= wanted
            for each in sorted(wanted):
                # Below a shared workflow all are shared; elsewhere an own one comes first.
                source, own_id = split_name(each)
                only = source if source is WorkflowSource.SHARED else None
                stored = await self._definitions.workflow(tenant, own_id, source=only)
                if stored is None:
                    continue
                is_shared = stored.source is WorkflowSource.SHARED
                if is_shared and only is None:
                    definitions[own_id] = 0
                name = shared_name(own_id) if is_shared else own_id
                found[name], definitions[name] = stored.workflow, stored.version
                inner = subworkflows(stored.workflow)
                named |= {shared_name(sub) for sub in inner} if is_shared else inner
            wanted = named - asked
        return found, definitions


def _version_key(tenant: TenantId, name: WorkflowId, versions: Mapping[WorkflowId, int]) -> object:
    owner = None if split_name(name)[0] is WorkflowSource.SHARED else tenant
    return owner, name, frozenset(versions.items())


def _content(name: WorkflowId, workflows: Mapping[WorkflowId, Workflow]) -> tuple[bytes, int]:
    """What the plan of these workflows follows from, as a digest, and the size of its text."""
    text = msgspec.json.encode((name, workflows))
    return hashlib.sha256(text).digest(), len(text)


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def _keep(kept: OrderedDict[_Key, _Value], key: _Key, value: _Value, most: int = KEPT_MAX) -> None:
    kept[key] = value
    if len(kept) > most:
        kept.popitem(last=False)
