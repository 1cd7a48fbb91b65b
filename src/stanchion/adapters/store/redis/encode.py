"""Keys and arguments: every key of the Redis store, and the arguments of its scripts.

Data that changes in one transaction is in one shard, and the shard is the hash tag of the key, so
that a cluster keeps it on one server: ``stanchion:{3f}:run:<run id>``. There are keys per shard,
per tenant and per run. Data that belongs to no tenant has a tag of its own. Shared workflows are in
every shard, and once more under that tag, which gives out their versions.

    per shard
    ready       sorted set   ready jobs: topic, tenant, number, job id
    ring        sorted set   the order of tenants: topic, turn, tenant
    turns       hash         the turn of each topic and tenant in the ring
    counters    hash         numbers for jobs, turns and dead letters
    open        hash         jobs that are ready or leased: ``s:<job>`` its state, deliveries, fence
                             and so on; ``w:<job>`` the job as it is sent to the worker
    deadlines   sorted set   leased jobs, by the end of their lease; jobs of attempts whose time
                             runs, by its end if that is sooner
    timers      sorted set   timers, by the time at which they are due
    timers_of   sorted set   the same by tenant: tenant, time, run id and timer
    timer_turns sorted set   tenants, by a time that is not after their next timer is due; while it
                             is due, by their last turn
    outbox      sorted set   runs to be advanced, by the time at which they are due
    rows        hash         the numbers of these rows
    active      hash         the number of slots that each tenant uses
    unfinished  sorted set   tenant and run id of each run that holds a slot
    known       sorted set   tenants that ever had a run
    finished    sorted set   run id and tenant, by the time at which the run ended
    keys        hash         idempotency keys, by tenant
    aging       sorted set   the keys of finished runs, by the time at which they expire
    configs     hash         the configuration of each tenant
    configured  sorted set   the tenants in ``configs``, by name
    authors     sorted set   tenants that have workflows
    shared_versions   hash        the newest version of each shared workflow
    shared_workflows  hash        every version of every shared workflow
    shared_names      sorted set  their ids
    shared_runs       sorted set  workflow id, tenant and run id of each unfinished run of them
    rates       hash         up to when a tenant has used its job rate
    ticks       hash         generation and tick of the last run of each schedule, by tenant
    letters     hash         dead letters
    dead        sorted set   their ids, oldest first
    dead_of     sorted set   their ids by tenant, oldest first
    approvals   hash         approvals that wait for a decision, by their place in the order
    asked       sorted set   these places, oldest first
    asked_of    sorted set   the same by tenant
    listed      sorted set   every run by status, workflow, labels and what it is a rerun of: a
                             prefix, then the time of creation and run id
    budgets     hash         what is used and held of each budget of each tenant
    reservations hash        what each unfinished run has reserved and used of budgets
    seen        hash         when each tenant last started a run
    seen_names  sorted set   these tenants, by name

    audit_log   stream       audit entries of all its tenants
    receipts    hash         batches of receipts of refusals, by id
    refused     sorted set   their places and ids, oldest first
    refused_of  sorted set   the same by tenant
    refused_count hash       the number of receipts of each tenant

    per tenant
    audit_log_of  stream     its audit entries
    runs        sorted set   time of creation and run id
    feed        stream       the newest timeline entries of all its runs
    versions    hash         the newest version of each workflow
    workflows   hash         every version of every workflow
    names       sorted set   the workflows' ids

    per pool of a topic limit, in the shard of the tenant or of the limit
    tokens      sorted set   tokens, by the time at which they expire
    token_order sorted set   the same in the order in which they were taken
    token_rate  text         the time up to which the rate is used

    per run
    run         hash         the run, and a field ``s:<step>`` for each step that has changed
    items       hash         items of for-each steps, ``<index>:<step>``. When a step starts, its
                             pending items are written in blocks, ``b<number>:<step>``: a line with
                             the index of the first item, then a line for each. An item with a
                             field of its own has changed since.
    out         hash         its open jobs (``j:<job>``), its timers (``t:<timer>``) and its pending
                             approvals (``a:<step>``)
    jobs        hash         its jobs that are no longer open
    inbox       hash         events that were accepted and not applied yet
    timeline    list         its timeline
    buried      set          its dead letters

An admission or a commit is one MessagePack map, because MessagePack keeps integers exact and is
cheap for Lua to read. The payloads in it are JSON texts: MessagePack in Lua has no bytes. ``false``
stands for an absent value, because a Lua list cannot contain nil.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Final, NamedTuple, TypeAlias, TypeVar, assert_never

import msgspec
from msgspec.structs import replace

from stanchion.adapters.redis.address import checked_namespace
from stanchion.adapters.redis.topology import slot_of
from stanchion.adapters.store.redis.decode import RunEnd, RunHeader
from stanchion.core.audit import AuditEntry
from stanchion.core.events import AttemptFailed, AttemptSucceeded, TimerFired
from stanchion.core.model import (
    SHARDS,
    Instant,
    Item,
    ItemKey,
    JobId,
    Run,
    RunId,
    RunStatus,
    Stamp,
    Step,
    StepId,
    StepStatus,
    TenantId,
    WorkflowId,
    WorkflowSource,
    make_run_id,
    shard_of_run,
    shard_of_tenant,
    split_name,
)
from stanchion.core.queue import PRIORITY_MAX, PROMOTED_ENTRY, QUEUE_TIMER, OnFull, frees_key
from stanchion.core.run import queued_line
from stanchion.core.schedule import TickMark
from stanchion.core.transition import (
    ClearTimer,
    CloseApproval,
    DispatchJob,
    Effect,
    OpenApproval,
    RevokeJob,
    SetTimer,
    StopRun,
    StopStep,
    Transition,
)
from stanchion.ports.records import (
    Admission,
    Commit,
    Result,
    StartTerms,
    Tenant,
    label_texts,
    result_event,
)

_T = TypeVar("_T")
_Ask: TypeAlias = dict[str, object]

_JSON = msgspec.json.Encoder()
_encode = _JSON.encode
_pack = msgspec.msgpack.Encoder().encode
_UNSTAMPED: Final = Stamp(0, "")
_DEFAULTS: Final = Tenant()
DEFAULT_CAP: Final = _DEFAULTS.max_concurrent_runs or ""
"""The cap of a tenant without configuration, as an argument of scripts."""


class EncodedAdmissions(NamedTuple):
    """The arguments of ``admit.lua``, apart from the time limit."""

    common: _Ask
    rows: list[bytes]

    def arguments(self, not_after: Instant) -> list[bytes]:
        return [_pack({**self.common, "not_after": not_after}), *self.rows]


def encode_admissions(
    admissions: Sequence[Admission],
    items: Mapping[RunId, list[str]],
    *,
    key_ttl_ms: int,
    audit_ttl_ms: int,
    in_blocks: bool = False,
) -> EncodedAdmissions:
    """The arguments of ``admit.lua`` for admissions of one tenant, at least one.

    What a batch has in common is encoded once: its rows share the same objects. ``items``: those
    that were encoded before, by ``encode_items``. ``in_blocks``: see there.
    """
    first = admissions[0]
    common = _common(first, key_ttl_ms)
    timers: dict[int, tuple[object, ...]] = {}
    rows: list[bytes] = []
    for each in admissions:
        known = items.get(each.run.id)
        if known is None:
            known = encode_items(each.run.items, in_blocks=in_blocks)
        ask = _admission(each, timers, known)
        if each.transition.timeline is not first.transition.timeline:
            ask["timeline"] = [to_json(entry) for entry in each.transition.timeline]
        if each.definitions is not first.definitions:
            ask["definitions"], ask["shared"] = _definitions(each.definitions)
        if each.budget is not first.budget and each.budget != first.budget:
            ask["budget"] = each.budget
        if each.audit is not None:
            ask["audit"] = audit_words(each.audit, audit_ttl_ms)
        rows.append(_pack(ask))
    return EncodedAdmissions(common, rows)


def encode_admission(
    admission: Admission,
    items: list[str] | None,
    *,
    key_ttl_ms: int,
    audit_ttl_ms: int,
    in_blocks: bool = False,
) -> bytes:
    """The admission of one run, for ``admit.lua``: behind ``encode_limit``."""
    if items is None:
        items = encode_items(admission.run.items, in_blocks=in_blocks)
    ask = _common(admission, key_ttl_ms)
    ask.update(_admission(admission, {}, items))
    if admission.audit is not None:
        ask["audit"] = audit_words(admission.audit, audit_ttl_ms)
    return _pack(ask)


def encode_limit(not_after: Instant) -> bytes:
    """What an admission of one run has in common with others: the time limit alone."""
    return _pack({"not_after": not_after})


def _common(first: Admission, key_ttl_ms: int) -> _Ask:
    own, shared = _definitions(first.definitions)
    return {
        "tenant": first.run.tenant,
        "key_ttl": key_ttl_ms,
        "dropped": (),
        "items": (),
        "timeline": [to_json(entry) for entry in first.transition.timeline],
        "limit": _or_false(_DEFAULTS.max_concurrent_runs),
        "rate": _or_false(_DEFAULTS.job_rate_per_s),
        "budget": first.budget,
        "definitions": own,
        "shared": shared,
    }


def _admission(
    admission: Admission, timers: dict[int, tuple[object, ...]], items: list[str]
) -> _Ask:
    """What is of one run alone. ``timers``: the effects that others have as well, by identity."""
    run, queue = admission.run, admission.queue
    place = created_place(run.created_at, run.id)
    constant = ["base", base_of(run), "whose", place + run.tenant, "about", about(run)]
    ask: _Ask = {
        "run": run.id,
        "effects": [_shared_effect(effect, timers) for effect in admission.transition.effects],
        "created": place,
        "created_at": run.created_at,
        "status": run.status,
        "listed": listed_names(run),
        "version": run.stamp.version,
        "fence": run.fence,
        "nonce": run.stamp.nonce,
        "fingerprint": admission.fingerprint,
        "queue": (str(PRIORITY_MAX - queue.priority), queue.fairness_key, queue.on_full or False),
        "takes_slot": run.holds_slot,
        "is_limited": admission.is_rate_limited,
        "is_finished": run.status.is_finished,
    }
    if admission.key is not None:
        ask["key"] = sized(run.tenant) + admission.key
        constant += ["key", sized(run.tenant) + admission.key]
    if run.workflow_source is WorkflowSource.SHARED:
        ask["shared_run"] = sized(run.workflow_id) + sized(run.tenant) + run.id
        constant += ["shared", sized(run.workflow_id) + sized(run.tenant) + run.id]
    # The run of the admission is stored: its first transition holds only the changes.
    ask["fields"] = [*constant, *changing_fields(run), *_steps(run.steps)]
    if items:
        ask["items"] = items  # the transition has the same ones
    if admission.before is not None:
        ask["waiting"] = _waiting(admission.before, len(constant))
    if run.finished_at is not None:
        ask["finished_at"] = run.finished_at
    if admission.tick is not None:
        ask["tick"] = _mark(run.tenant, admission.tick)
    return ask


def _shared_effect(effect: Effect, timers: dict[int, tuple[object, ...]]) -> tuple[object, ...]:
    if not isinstance(effect, SetTimer):
        return _effect(effect)
    known = timers.get(id(effect))
    if known is None:
        known = timers[id(effect)] = _effect(effect)
    return known


def encode_terms(tenant: TenantId, terms: Sequence[StartTerms]) -> bytes:
    """The terms of starts, as ``part_terms.lua`` takes them."""
    return _pack([terms_of(tenant, each) for each in terms])


def terms_of(tenant: TenantId, terms: StartTerms) -> _Ask:
    """The terms of a start, as the scripts take them."""
    own, shared = _definitions(terms.definitions)
    return {
        "tenant": tenant,
        "definitions": own,
        "shared": shared,
        "budget": terms.budget,
        "limit": _or_false(_DEFAULTS.max_concurrent_runs),
        "waiting": True,
        "queue": ("", "", terms.on_full or False),
    }


def _waiting(before: Run, constant: int) -> tuple[object, ...]:
    """The run as it would wait in the queue; ``constant``: how many words of its fields stay."""
    # The same as ``queued_run``, without making a run: every start comes through here.
    timeline = (to_json(queued_line(before)),)
    if not before.steps and not before.items:
        return constant, _QUEUED, (), timeline, _QUEUE_TIMER
    fields = (*_QUEUED, *_steps(before.steps))  # of a rerun
    return constant, fields, encode_items(before.items), timeline, _QUEUE_TIMER


def _mark(tenant: TenantId, tick: TickMark) -> list[str]:
    """The name of a schedule, and its mark as text that sorts as the mark does."""
    return [sized(tenant) + tick.schedule_id, f"{tick.generation:020d}:{tick.tick:020d}"]


def encode_commit(
    commit: Commit, tenant: TenantId, *, key_ttl_ms: int, in_blocks: bool = False
) -> bytes:
    """The argument of ``commit.lua``. ``in_blocks``: see ``encode_items``."""
    transition = commit.transition
    ask = _ask(commit.run_id, tenant, transition, key_ttl_ms)
    ask["fields"] = [*changing_fields(transition), *_steps(transition.steps)]
    ask["dropped"] = _dropped(transition)
    ask["items"] = encode_items(transition.items, in_blocks=in_blocks)
    ask["is_finished"] = transition.status.is_finished
    ask["finished_at"] = _or_false(transition.finished_at)
    ask["read_version"] = commit.read.version
    ask["read_nonce"] = commit.read.nonce
    ask["nonce"] = commit.nonce
    ask["fence"] = _or_false(commit.fence)
    ask["applied"] = commit.applied
    ask["status"] = transition.status
    ask["frees_key"] = transition.error is not None and frees_key(transition)
    # As ``core.queue.goes_on`` says, without a call: every commit comes through here.
    ask["goes_on"] = transition.status.is_finished or PROMOTED_ENTRY in commit.applied
    ask["limit"] = _or_false(_DEFAULTS.max_concurrent_runs)
    return _pack(ask)


def event_of(result: Result) -> AttemptSucceeded | AttemptFailed:
    """The event of a result, without step and item: the stored job has them, not the result."""
    return result_event(result, StepId(""))


def pack_tenant(config: Tenant) -> bytes:
    """The configuration of a tenant, for ``put_tenant.lua``."""
    limit, rate = _or_false(config.max_concurrent_runs), _or_false(config.job_rate_per_s)
    budgets: list[str | int] = []
    for name in sorted(config.budgets):
        budgets += [name, config.budgets[name].limit, config.budgets[name].window]
    stored = (limit, rate, to_json(config), config.workflows, budgets)
    if config.on_full is OnFull.QUEUE:
        return _pack((*stored, True, config.queue_max, config.queue_wait_ms))
    # As versions without a queue wrote it: a configuration that is written again is the same.
    return _pack(stored)


def pack_usage(usage: Mapping[str, int]) -> bytes:
    """What a job has used, for ``charge_usage`` in Lua; empty for none."""
    return _pack(usage) if usage else b""


def format_text(level: int) -> str:
    """The format of the data at a level, as it is stored."""
    return f"{level} with {SHARDS} shards"


def to_json(value: object) -> str:
    """A value as JSON text."""
    return "null" if value is None else _encode(value).decode()


def item_field(step_id: StepId, index: int) -> str:
    """The hash field of an item."""
    return f"{index}:{step_id}"


def created_place(created_at: Instant, run_id: str) -> str:
    """The position of a run in its tenant's list: sorts by time of creation."""
    return f"{created_at:016d}{run_id}"


def about(run: Run) -> str:
    """What lists show of a run that never changes."""
    return to_json(
        RunHeader(
            run.workflow_id,
            run.workflow_version,
            run.created_at,
            run.risk,
            run.labels,
            run.rerun_of,
        )
    )


def listed_names(run: Run) -> list[str]:
    """The names of a run in ``listed``, except those of its status."""
    place = created_place(run.created_at, run.id)
    prefixes = [workflow_range(run.tenant, run.workflow_id)]
    for label in label_texts(run.labels):
        prefixes += [label_range(run.tenant, label), label_range(None, label)]
    if run.rerun_of is not None:
        prefixes.append(rerun_range(run.rerun_of))
    return [prefix + place for prefix in prefixes]


def pack_listed(run: Run) -> bytes:
    """The same, for ``adopt.lua``."""
    return _pack(listed_names(run))


def status_range(tenant: TenantId | None, status: RunStatus) -> str:
    """The prefix of the runs with a status. The same as in ``part_listed.lua``."""
    return f"S{status}:" if tenant is None else f"s{sized(tenant)}{status}:"


@lru_cache(maxsize=1024)
def workflow_range(tenant: TenantId, workflow_id: WorkflowId) -> str:
    """The prefix of the runs of a workflow."""
    return f"w{sized(tenant)}{sized(workflow_id)}"


def label_range(tenant: TenantId | None, label: str) -> str:
    """The prefix of the runs with a label."""
    return f"L{sized(label)}" if tenant is None else f"l{sized(tenant)}{sized(label)}"


def rerun_range(run_id: RunId) -> str:
    """The prefix of the reruns of a run."""
    return f"r{sized(run_id)}"


def approval_place(since: Instant, run_id: str, step_id: str) -> str:
    """The place of an approval in the order of all: the order of texts is that of time."""
    return f"{since:016d}{run_id}{step_id}"


def base_of(run: Run) -> str:
    """The constant part of a run. What changes has fields of its own."""
    return to_json(
        replace(
            run,
            status=RunStatus.PENDING,
            output=None,
            error=None,
            finished_at=None,
            steps={},
            items={},
            stamp=_UNSTAMPED,
            fence=0,
        )
    )


def _definitions(
    definitions: Mapping[WorkflowId, int],
) -> tuple[list[str | int], list[str | int] | bool]:
    """Own workflows and versions, and the same of shared ones; ``False`` without any."""
    own: list[str | int] = []
    shared: list[str | int] = []
    for name, version in definitions.items():
        source, workflow_id = split_name(name)
        (own if source is WorkflowSource.OWN else shared).extend((workflow_id, version))
    return own, shared or False


def _ask(run_id: RunId, tenant: TenantId, transition: Transition, key_ttl_ms: int) -> _Ask:
    return {
        "run": run_id,
        "tenant": tenant,
        "effects": [_effect(effect) for effect in transition.effects],
        "timeline": [to_json(entry) for entry in transition.timeline],
        "key_ttl": key_ttl_ms,
        "dropped": (),
    }


def changing_fields(what: Run | Transition) -> Iterator[str]:
    """The fields that every commit writes. Most runs have no output and no end yet."""
    yield from ("status", what.status)
    if what.output is not None:
        yield from ("output", to_json(what.output))
    if what.finished_at is not None or what.error is not None:
        yield from ("end", to_json(RunEnd(what.finished_at, what.error)))


def _dropped(transition: Transition) -> list[str]:
    """The fields that a commit removes, if they are there."""
    written = {*changing_fields(transition)}
    return [name for name in ("output", "end") if name not in written]


def _steps(steps: Mapping[StepId, Step]) -> list[str]:
    return [word for step_id in steps for word in (f"s:{step_id}", to_json(steps[step_id]))]


def encode_items(items: Mapping[ItemKey, Item], *, in_blocks: bool = False) -> list[str]:
    """Items as fields of a hash, each a name and a value.

    ``in_blocks``: those that wait for their turn may share a field. Ten thousand fields take the
    server 10 ms, for which all other callers wait. Older versions cannot read blocks.
    """
    if in_blocks and any(item.status is StepStatus.PENDING for item in items.values()):
        return [word for words in encode_blocks(items) for word in words]
    return _own_fields(items.items())


def _own_fields(items: Iterable[tuple[ItemKey, Item]]) -> list[str]:
    return [word for key, item in items for word in (item_field(*key), to_json(item))]


BLOCK_ITEMS: Final = 256
"""The same number is in ``items.lua``."""
_BLOCK_ITEMS_MIN: Final = 16
_BLOCK_BYTES_MAX: Final = 64 * 1024
"""To read one item of a block reads all of them."""


def encode_blocks(items: Mapping[ItemKey, Item]) -> Iterator[list[str]]:
    """The words of ``encode_items`` with blocks, in pieces of at most a block."""
    written: set[str] = set()
    # Items are pending only until they begin, so they are never written as such again.
    for (step_id, number, is_pending), group in groupby(items.items(), _block_of):
        some, block = [*group], f"b{number}:{step_id}"
        first = some[0][0].item
        if (
            is_pending
            and len(some) >= _BLOCK_ITEMS_MIN
            and block not in written
            and [key.item for key, _ in some] == [*range(first, first + len(some))]
        ):
            # Each text is followed by a line break, and contains none.
            texts = _JSON.encode_lines([item for _, item in some])
            if len(texts) <= _BLOCK_BYTES_MAX:
                written.add(block)
                yield [block, f"{first}\n{texts[:-1].decode()}"]
                continue
        yield _own_fields(some)


def _block_of(entry: tuple[ItemKey, Item]) -> tuple[StepId, int, bool]:
    (step_id, index), item = entry
    return step_id, index // BLOCK_ITEMS, item.status is StepStatus.PENDING


def _effect(effect: Effect) -> tuple[object, ...]:
    match effect:
        case DispatchJob(job):
            work, timeout_ms = to_json(job), job.attempt_timeout_ms or 0
            item = _or_false(job.item)
            return ("dispatch", job.id, job.step_id, item, job.topic, work, timeout_ms)
        case SetTimer(timer, due):
            return ("set", timer.key, due, timer.step_id or "", to_json(TimerFired(timer=timer)))
        case ClearTimer(timer):
            return ("clear", timer.key)
        case OpenApproval(approval):
            place = approval_place(approval.since, approval.run_id, approval.step_id)
            return ("open", approval.step_id, place, to_json(approval))
        case CloseApproval(step_id):
            return ("close", step_id)
        case RevokeJob(job_id):
            return ("revoke", job_id)
        case StopStep(step_id):
            return ("stop_step", step_id)
        case StopRun():
            return ("stop_run",)
        case _:
            assert_never(effect)


def _or_false(value: _T | None) -> _T | bool:
    return False if value is None else value


_QUEUED: Final = ("status", str(RunStatus.QUEUED))
_QUEUE_TIMER: Final = (QUEUE_TIMER.key, to_json(TimerFired(timer=QUEUE_TIMER)))

OF_SHARD: Final = frozenset(
    (
        *("ready", "ring", "turns", "counters", "open", "deadlines", "timers"),
        *("timers_of", "timer_turns"),
        *("outbox", "rows", "active", "unfinished", "known", "finished", "keys", "aging"),
        *("configs", "configured", "rates", "ticks", "letters", "dead", "dead_of", "mark"),
        *("approvals", "asked", "asked_of", "audit_log"),
        *("listed", "seen", "seen_names", "budgets", "reservations"),
        *("queue", "queue_ring", "queue_turns", "waiting", "queued", "promoted"),
        *("receipts", "refused", "refused_of", "refused_count"),
        *("shared_versions", "shared_workflows", "shared_names", "shared_runs", "authors"),
    )
)
OF_TENANT: Final = frozenset(("runs", "feed", "versions", "workflows", "names", "audit_log_of"))
OF_RUN: Final = frozenset(("run", "items", "out", "jobs", "inbox", "timeline", "buried"))

RUN_ID_CHARS: Final = len(make_run_id(TenantId(""), Instant(0), 0))
"""All run ids have the same length, so a name may begin with one."""
PLACE_CHARS: Final = 16 + RUN_ID_CHARS
"""The position of a run in its tenant's list: the time of its creation, and its id."""
COMMON_TAG: Final = "common"
"""The hash tag of data that belongs to no tenant."""

_WHOLE, _RUN, _TENANT = range(3)
"""What a key still lacks: nothing, a run id, a tenant."""


class StoreKeys:
    """Builds keys below one namespace."""

    def __init__(self, namespace: str) -> None:
        checked_namespace(namespace)
        self._roots = tuple(f"{namespace}:{{{shard:02x}}}:" for shard in range(SHARDS))
        self._common = f"{namespace}:{{{COMMON_TAG}}}:"
        self._patterns: dict[tuple[tuple[str, ...], int], list[tuple[str, int]]] = {}
        self.slots = tuple(slot_of(f"{shard:02x}") for shard in range(SHARDS))
        self.common_slot = slot_of(COMMON_TAG)
        self.format = f"{self._common}format"

    def of_shard(self, shard: int, name: str) -> str:
        assert name in OF_SHARD, name
        return self._roots[shard] + name

    def of_tenant(self, tenant: TenantId, name: str) -> str:
        assert name in OF_TENANT, name
        return f"{self._roots[shard_of_tenant(tenant)]}{name}:{tenant}"

    def of_run(self, run_id: RunId, name: str) -> str:
        assert name in OF_RUN, name
        return f"{self._roots[_shard(run_id)]}{name}:{run_id}"

    def of_pool(self, shard: int, pool: str) -> list[str]:
        """The keys of a pool of tokens of a topic limit."""
        root = self._roots[shard]
        return [f"{root}{name}:{pool}" for name in ("tokens", "token_order", "token_rate")]

    def common_audit(self, tenant: TenantId | None) -> tuple[str, str]:
        """The audit log of data that belongs to no tenant: all entries, and a tenant's."""
        return f"{self._common}audit_log", f"{self._common}audit_log_of:{tenant or ''}"

    @property
    def audit_once(self) -> str:
        """The key of the audit entries that must be written once."""
        return f"{self._common}audit_once"

    def documents(self, kind: str) -> tuple[str, str]:
        """The keys of the documents of a kind, and of their sorted names."""
        return f"{self._common}documents:{kind}", f"{self._common}document_names:{kind}"

    def replicas(self) -> tuple[str, str]:
        """The keys of the replicas' summaries, and of the times of their reports."""
        return f"{self._common}replicas", f"{self._common}replica_times"

    def shared_workflows(self) -> tuple[str, str, str]:
        """The keys of the shared workflows' versions, records and ids outside all shards."""
        root = self._common
        return f"{root}shared_versions", f"{root}shared_workflows", f"{root}shared_names"

    def all_of(
        self, names: tuple[str, ...], shard: int, *, run_id: str = "", tenant: str = ""
    ) -> list[str]:
        """The keys of a script, by the names in its contract."""
        return [
            begin if kind is _WHOLE else begin + (run_id if kind is _RUN else tenant)
            for begin, kind in self._pattern(names, shard)
        ]

    def of_runs(self, names: Sequence[str], shard: int, runs: Sequence[RunId]) -> list[str]:
        """The keys with these names of some runs of one shard, run by run."""
        begins = [f"{self._roots[shard]}{name}:" for name in names]
        return [begin + run_id for run_id in runs for begin in begins]

    def _pattern(self, names: tuple[str, ...], shard: int) -> list[tuple[str, int]]:
        """The constant parts of the keys of a script in one shard."""
        known = self._patterns.get((names, shard))
        if known is None:
            root = self._roots[shard]
            known = self._patterns[names, shard] = [
                (root + name, _WHOLE)
                if name in OF_SHARD
                else (f"{root}{name}:", _RUN if name in OF_RUN else _TENANT)
                for name in names
            ]
            assert set(names) <= OF_SHARD | OF_RUN | OF_TENANT, names
        return known


def pack_audit(entry: AuditEntry | None, ttl_ms: int) -> bytes:
    """The argument of a script that may write an audit entry; empty for none."""
    return b"" if entry is None else _pack(audit_words(entry, ttl_ms))


def audit_words(entry: AuditEntry, ttl_ms: int) -> tuple[int, bool, str]:
    """An audit entry, as ``part_audit.lua`` takes it."""
    return ttl_ms, entry.tenant is not None, to_json(entry)


def run_of_job(job_id: JobId) -> RunId | None:
    """The run of a job id; ``None`` if the text is not a job id."""
    run_id = RunId(job_id.partition(":")[0])
    return None if shard_of_run(run_id) is None else run_id


def sized(text: str) -> str:
    """Length, colon, text: none is a prefix of another. The same as in ``part_text.lua``."""
    return f"{len(text.encode())}:{text}"


def _shard(run_id: RunId) -> int:
    shard = shard_of_run(run_id)
    assert shard is not None, "asked before"
    return shard
