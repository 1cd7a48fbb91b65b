"""The ledger of locks: all grants, and the leases that replicas trust."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from stanchion.core.lease import Holding, LeasePolicy, OnLockError
from stanchion.core.model import Instant, RunId
from stanchion.ports.locks import Granted, Held, LockReleased, Renewed
from stanchion.services.renewal import Lease
from stanchion.sim import invariants as must
from stanchion.sim.history import History
from stanchion.sim.loop import LoopClock, Process
from stanchion.sim.renewals import RenewalRecord
from stanchion.sim.servers import LockServer

NEVER_S: float = -1e9


@dataclass(slots=True)
class ObservedHold:
    """A lease that a replica works under."""

    process: Process
    lease: Lease
    policy: LeasePolicy
    since_s: float
    is_closed: bool
    """Whether the replica said, when it asked, that its level closes the class."""
    clock: LoopClock

    @property
    def believed_ms(self) -> float | None:
        """How long the holder will trust its lease, in the time of servers; ``None``: it does not.

        Also while its process is paused: then it would act on its belief when it resumes.
        """
        trust = self.lease.trust
        if self.lease.fence is None or not isinstance(trust, Holding):
            return None
        return self.clock.for_servers_ms(trust.trusted_until - self.clock.moment())


@dataclass(slots=True)
class _Holder:
    token: str
    fence: int
    until: Instant


@dataclass(slots=True)
class LockLedger:
    """The record of the lock server."""

    history: History
    locks: LockServer
    tallies: defaultdict[str, Counter[str]]
    holds: dict[int, ObservedHold] = field(default_factory=dict)
    term_ms_of: Callable[[str], set[int]] = lambda _name: set()
    """The terms that a lock may be taken for; none if any."""
    renewals: RenewalRecord = field(init=False)
    on_gate: Callable[[Process], None] = lambda _process: None
    """Called when the gate of a replica asks for a tenant's lock."""
    _tickets: defaultdict[str, dict[str, Instant]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    """By name: the tokens that wait in the queue, and until when."""
    _holders: dict[str, _Holder] = field(default_factory=dict)
    _fences: dict[str, dict[int, str]] = field(default_factory=dict)
    """For every name, all fences that were granted, with their tokens."""
    _not_owned: set[tuple[str, int]] = field(default_factory=set)
    _forced_at_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.renewals = RenewalRecord(self.history)

    # ── What replicas do ─────────────────────────────────────────────────────────────────────────

    def holding(self, hold: ObservedHold) -> None:
        """A replica has acquired a lease, or proceeds without one."""
        self.holds[id(hold)] = hold
        if hold.lease.is_degraded:
            must_close = hold.policy.on_lock_error is OnLockError.FAIL_CLOSED or hold.is_closed
            self.tallies[hold.process.name]["workflow_lock_fallback"] += 1
            self.history.check(
                "unleased only by policy",
                must.unleased_only_by_policy(hold.lease.name, must_close=must_close),
            )

    def let_go(self, hold: ObservedHold) -> None:
        """The body of a hold has ended."""
        self.holds.pop(id(hold), None)
        self.renewals.ended(hold.process, hold.lease.name)

    def sends(self, process: Process, verb: str, name: str, token: str) -> None:
        """A process is about to ask for a lock, to renew it or to release it."""
        self.renewals.sends(process, verb, name, token)
        if name.startswith("admission/"):
            self.on_gate(process)

    def answered(
        self, process: Process, name: str, token: str, answer: object, ttl_ms: int
    ) -> None:
        """The answer has reached the process; ``None``: it has given up."""
        self.renewals.answered(process, name, token, answer, ttl_ms)

    def held_by(self, process: Process, run_id: RunId) -> list[ObservedHold]:
        """The leases of a replica on a run."""
        name = f"run/{run_id}"
        return [
            hold
            for hold in self.holds.values()
            if hold.process is process and hold.lease.name == name
        ]

    def writes(self, process: Process, run_id: RunId) -> None:
        """Check that a replica that is about to commit owns the lease it trusts."""
        for hold in self.held_by(process, run_id):
            lease = hold.lease
            if lease.fence is None or lease.lost is not None:
                continue
            self._owns(hold)
            was_told = (lease.name, lease.fence) in self._not_owned
            self.history.check(
                "who is told 'not yours' stops",
                [f"{lease.name}: fence {lease.fence} goes on"] if was_told else [],
            )

    def trusts(self, hold: ObservedHold) -> None:
        """Check that a holder that is about to write owns the lease that it trusts."""
        self._owns(hold)

    def is_owner(self, hold: ObservedHold) -> bool:
        """Whether the holder owns its lease, which the lock server cannot have forgotten."""
        name = hold.lease.name
        holder = self._holders.get(name)
        return (
            hold.since_s > max(self.locks.lost_at_s, self._forced_at_s.get(name, NEVER_S))
            and holder is not None
            and holder.fence == hold.lease.fence
            and self.locks.clock.now() < holder.until
        )

    def is_borrowed(self, fence: int) -> bool:
        """Whether the fence is above the server's time: see ``_granted``."""
        return fence > self.locks.clock.now() * 1_000

    def _owns(self, hold: ObservedHold) -> None:
        name = hold.lease.name
        if hold.since_s > max(self.locks.lost_at_s, self._forced_at_s.get(name, NEVER_S)):
            owner = self.locks.real.fence_of(name)
            self.history.check(
                "a trusted lease is owned",
                must.holder_owns(name, fence=hold.lease.fence, owner=owner),
            )

    # ── What the lock server does ────────────────────────────────────────────────────────────────

    def locked(
        self, verb: str, name: str, token: str, answer: object, *, is_late: bool, ttl_ms: int
    ) -> None:
        """The lock server has executed a command."""
        match verb, answer:
            case "acquire", Held(expires_in_ms):
                self._refused(name, token, expires_in_ms)
            case "acquire", Granted(fence):
                self._tickets[name].pop(token, None)
                self._granted(name, token, fence, ttl_ms, is_late=is_late)
            case "renew", Renewed():
                self._renewed(name, token, ttl_ms)
            case "release", LockReleased():
                holder = self._holders.pop(name, None)
                is_owner = holder is not None and holder.token == token
                said = [] if is_owner else [f"{name} was released by one who had not got it"]
                self.history.check("only the owner releases", said)
            case "force", True:
                self.history.tell(f"locks  {name} released by an operator")
                self._forced_at_s[name] = asyncio.get_running_loop().time()
                self._holders.pop(name, None)
            case _:
                pass
        self._compare_beliefs()

    def joined(self, name: str, token: str, ticket_ms: int) -> None:
        """A waiter has joined the queue of a lock, or renewed its ticket."""
        self._tickets[name][token] = Instant(self.locks.clock.now() + ticket_ms)

    def _refused(self, name: str, token: str, expires_in_ms: int) -> None:
        """Check what a caller is told of a lock that it does not get."""
        now, tickets = self.locks.clock.now(), self._tickets[name]
        holder = self._holders.get(name)
        ends = [ends_at for other, ends_at in tickets.items() if other != token]
        ends += [] if holder is None else [holder.until]
        if ends:
            said = must.refusal_names_an_end(name, in_ms=expires_in_ms, ends=ends, now=now)
            self.history.check("a busy lock names its end", said)

    def told_not_owned(self, name: str, token: str) -> None:
        """The lock server has answered a holder that it does not own the lock."""
        fences = self._fences.get(name, {})
        self._not_owned.update((name, each) for each, whose in fences.items() if whose == token)

    def _compare_beliefs(self) -> None:
        """No holder trusts its lease for longer than the server keeps it."""
        now = self.locks.clock.now()
        for hold in self.holds.values():
            believed_ms, name = hold.believed_ms, hold.lease.name
            forced_at_s = self._forced_at_s.get(name, NEVER_S)
            if believed_ms is None or hold.since_s <= max(self.locks.lost_at_s, forced_at_s):
                continue
            holder = self._holders.get(name)
            is_its_own = holder is not None and holder.fence == hold.lease.fence
            kept_ms = holder.until - now if holder is not None and is_its_own else 0
            self.history.check(
                "no deadline is after the server's",
                must.belief_is_covered(name, believed_ms=believed_ms, kept_ms=kept_ms),
            )

    def lost(self) -> None:
        """The lock server has lost its data."""
        self._holders.clear()

    def _renewed(self, name: str, token: str, ttl_ms: int) -> None:
        holder, now = self._holders.get(name), self.locks.clock.now()
        is_owner = holder is not None and holder.token == token and now < holder.until
        said = [] if is_owner else [f"{name} was renewed for one who had lost it"]
        self.history.check("grants are disjoint", said)
        if holder is not None and holder.token == token:
            holder.until = Instant(now + ttl_ms)

    def _granted(self, name: str, token: str, fence: int, ttl_ms: int, *, is_late: bool) -> None:
        now, check = self.locks.clock.now(), self.history.check
        check(
            "nothing after its deadline",
            must.nothing_after_deadline(f"a grant of {name}", is_late=is_late, has_changed=True),
        )
        before = self._holders.get(name)
        if before is not None and before.token != token:
            check("grants are disjoint", must.grant_is_disjoint(name, until=before.until, now=now))
            check(
                "fences rise", must.fence_rises(name, before=before.fence, now=fence, strictly=True)
            )
        whose = self._fences.setdefault(name, {}).setdefault(fence, token)
        # A fence above the server's time comes from the fence of the run. A server that has lost
        # its data and whose clock is behind may grant it again: then the commit decides.
        is_borrowed = fence > now * 1_000
        said = [f"{name}: fence {fence} was given out a second time"]
        check("fences rise", [] if whose == token or is_borrowed else said)
        if whose != token:
            # What its first owner was told is not about this one.
            self._fences[name][fence] = token
            self._not_owned.discard((name, fence))
        terms = self.term_ms_of(name)
        said = [f"{name} was taken for {ttl_ms} ms, and not for {sorted(terms)}"]
        check("a lease lasts its term", said if terms and ttl_ms not in terms else [])
        self._holders[name] = _Holder(token, fence, Instant(now + ttl_ms))
        self.history.tell(f"locks  {name} granted with fence {fence}")
        self._look_at_believers(name)

    def _look_at_believers(self, name: str) -> None:
        for hold in list(self.holds.values()):
            lease, process = hold.lease, hold.process
            is_awake = not process.is_paused and not process.is_dead
            if is_awake and lease.name == name and lease.fence is not None and lease.lost is None:
                self._owns(hold)
