"""Renewals: every lease is renewed at its time, and watched for its loss.

A renewal that comes early costs a call, and one that comes late costs the safety of the next
outage; neither breaks another invariant on most days. The times are computed here from the calls
alone: a lease is renewed a third of its term after the last request that was granted, and again
between a twenty-fourth and a twelfth of the term after a failure. The attempts of a worker are
spread over the time in which it trusts its lease.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from stanchion.core.lease import LeaseTerms, job_terms_for
from stanchion.ports.locks import Granted, NotOwned, Renewed
from stanchion.sim.history import History
from stanchion.sim.loop import LoopClock, Process
from stanchion.transport.messages import HttpReply
from stanchion.wire.worker import LeaseAnswer, RenewAnswer, RenewRequest
from stanchion.worker import Job
from stanchion.worker.server import LEASE_PATH, RENEW_PATH

_DRIFT: Final = 0.012
"""Clocks drift by a hundredth."""
_SLACK_MS: Final = 20
_ATTEMPTS: Final = 3
_ADMISSION: Final = "admission/"
_BACK_S: Final = 8.0
"""A lock of the gate is given back within this time: two calls, each with its time-out."""
_IN_TIME: Final = "leases are renewed at their time"
_WATCHED_S: Final = 0.8
"""A lease is in a held call so long after it came: a quarter of a second, or the half second after
which a call may be replaced."""
_TROUBLE_S: Final = 8.0
"""After a failed call a worker pauses for up to five seconds."""
_BEGUN_S: Final = 0.1
_HELD_MS: Final = 1_000
"""A held call that is answered sooner, and names no lost lease, is followed by a pause."""
_WATCH: Final = "held leases are watched"


# ── Rules ────────────────────────────────────────────────────────────────────────────────────────


def renewed_on_time(name: str, *, waited_ms: float, ttl_ms: int, is_retry: bool) -> Iterator[str]:
    """A lease is renewed after a third of its term, and after a failure a moment later."""
    low_ms, high_ms = (ttl_ms / 24, ttl_ms / 12) if is_retry else (ttl_ms / 3, ttl_ms / 3)
    if not low_ms * (1 - _DRIFT) - _SLACK_MS <= waited_ms <= high_ms * (1 + _DRIFT) + _SLACK_MS:
        since = "a failed renewal" if is_retry else "its last renewal"
        yield f"{name}, of {ttl_ms} ms, was renewed {waited_ms:.0f} ms after {since}"


def retried_on_time(name: str, *, at: int, earliest: int) -> Iterator[str]:
    """The attempts that are left are spread over the time that is left."""
    if at < earliest:
        yield f"{name} was renewed again {earliest - at} ms early"


def not_left_out(name: str, *, due_in_ms: int, ttl_ms: int) -> Iterator[str]:
    """A lease that is due within a twenty-fourth of its term is renewed with those that are due."""
    if due_in_ms <= ttl_ms // 24:
        yield f"{name} is due in {due_in_ms} ms, and was left out of a renewal"


# ── Locks ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _Renewed:
    good_s: float
    """When the last request that was granted was sent."""
    ttl_ms: int
    pauses: int
    sent_s: float = 0.0
    failed_s: float | None = None
    is_asking: bool = False


@dataclass(slots=True)
class RenewalRecord:
    """The renewals of leases that replicas and users of leases hold in the lock server."""

    history: History
    _leases: dict[tuple[str, str], _Renewed] = field(default_factory=dict)
    """By process and name."""
    _asked_s: dict[tuple[str, str], float] = field(default_factory=dict)
    _gates: dict[tuple[str, str], tuple[float, Process, int]] = field(default_factory=dict)
    """Locks of gates that were granted, by name and token: when, to whom, and its pauses."""

    def sends(self, process: Process, verb: str, name: str, token: str) -> None:
        """A process is about to ask the lock server."""
        key, now_s = (process.name, name), process.loop.now_s
        if verb == "acquire":
            self._asked_s[key] = now_s
            if name.startswith(_ADMISSION):
                self.check_given_back(now_s)
        elif verb == "release":
            self._gates.pop((name, token), None)
        elif (known := self._leases.get(key)) is not None:
            self._check(name, known, process, now_s)
            known.sent_s, known.pauses, known.is_asking = now_s, process.pauses, True

    def answered(
        self, process: Process, name: str, token: str, answer: object, ttl_ms: int
    ) -> None:
        """The answer has come; ``None``: there is none."""
        key, now_s = (process.name, name), process.loop.now_s
        match answer:
            case Granted() if name.startswith(_ADMISSION):
                self._gates[name, token] = (now_s, process, process.pauses)
            case Granted():
                self._leases[key] = _Renewed(self._asked_s[key], ttl_ms, process.pauses)
            case Renewed() if key in self._leases:
                known = self._leases[key]
                known.good_s, known.failed_s, known.is_asking = known.sent_s, None, False
            case NotOwned():
                self._leases.pop(key, None)
            case None if key in self._leases:
                known = self._leases[key]
                known.failed_s, known.is_asking = now_s, False
            case _:
                pass

    def ended(self, process: Process, name: str) -> None:
        """A hold has ended: until then its lease was renewed in time."""
        known = self._leases.pop((process.name, name), None)
        if known is None or known.is_asking or known.failed_s is not None:
            return
        waited_ms = 1_000 * (process.loop.now_s - known.good_s)
        if known.pauses == process.pauses and waited_ms > known.ttl_ms / 3:
            said = renewed_on_time(name, waited_ms=waited_ms, ttl_ms=known.ttl_ms, is_retry=False)
            self.history.check(_IN_TIME, said)

    def check_given_back(self, now_s: float) -> None:
        """Check that gates have given back the locks that they took long ago."""
        for (name, token), (since_s, process, pauses) in [*self._gates.items()]:
            if process.is_dead or pauses != process.pauses:
                del self._gates[name, token]
            elif now_s - since_s > _BACK_S:
                said = f"{process.name} has {name} since {now_s - since_s:.1f} s"
                self.history.check("what is held is given back", [said])

    def _check(self, name: str, known: _Renewed, process: Process, now_s: float) -> None:
        if known.pauses != process.pauses:
            return
        is_retry = known.failed_s is not None
        since_s = known.good_s if known.failed_s is None else known.failed_s
        said = renewed_on_time(
            name, waited_ms=1_000 * (now_s - since_s), ttl_ms=known.ttl_ms, is_retry=is_retry
        )
        self.history.check(_IN_TIME, said)


# ── Workers ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _JobLease:
    good_at: int
    """When the last request that was granted was sent, by the worker's clock."""
    ttl_ms: int
    pauses: int
    failures: int = 0
    failed_at: int = 0
    is_asking: bool = False
    asked_at: int = 0
    usage: dict[str, int] = field(default_factory=dict)
    """What the server was told of it last."""
    watched: bool = False
    """Whether it was in a held call."""

    @property
    def due_at(self) -> int:
        return self.good_at + self.ttl_ms // 3

    def earliest(self) -> int:
        """When it may be renewed next, alone or with others."""
        if not self.failures:
            return self.due_at - self.ttl_ms // 24
        terms: LeaseTerms = job_terms_for(self.ttl_ms)
        last_at = max(self.failed_at, self.good_at + terms.last_attempt_window_ms[0])
        parts = max(1, _ATTEMPTS - self.failures)
        return self.failed_at + (last_at - self.failed_at) // parts - self.ttl_ms // 120


@dataclass(slots=True)
class _Call:
    """A call of the worker that renews leases, or is held until one is lost."""

    sent_at: int
    sent_s: float
    keys: list[tuple[str, int]]
    usage: list[dict[str, int]]
    wait_s: float
    is_due: bool


@dataclass(slots=True)
class WorkerLeases:
    """The leases of one worker, as its calls and handlers show them."""

    history: History
    process: Process
    clock: LoopClock
    _leases: dict[tuple[str, int], _JobLease] = field(default_factory=dict)
    _running: dict[tuple[str, int], tuple[Job, float, int]] = field(default_factory=dict)
    """By job and fence: the handler's job, when it began, and the pauses before."""
    _asked_at: int = 0
    _troubled_s: float = -1e9
    """When a call last failed, or was answered earlier than it should."""

    # ── Calls ────────────────────────────────────────────────────────────────────────────────────

    def sends(self, path: str, body: bytes) -> _Call | None:
        """The worker sends a request; the call is to be given to ``ended``."""
        now = self.clock.moment()
        if path == LEASE_PATH:
            return _Call(now, self.process.loop.now_s, [], [], 0.0, is_due=False)
        if path != RENEW_PATH:
            return None
        request = msgspec.json.decode(body, type=RenewRequest)
        keys = [(each.job_id, each.fence) for each in request.leases]
        usage = [each.usage for each in request.leases]
        call = _Call(now, self.process.loop.now_s, keys, usage, request.wait_s, is_due=False)
        if request.wait_s:
            for key in keys:
                if key in self._leases:
                    self._leases[key].watched = True
            return call
        known = [self._leases[key] for key in keys if key in self._leases]
        call.is_due = any(each.failures or now >= each.due_at for each in known)
        if call.is_due:
            self._check_due(keys, now)
        for each in known:
            each.is_asking, each.asked_at, each.pauses = True, now, self.process.pauses
        return call

    def ended(self, path: str, call: _Call | None, answer: HttpReply | None) -> None:
        """The answer to a request has come; ``None``: there is none."""
        if call is None:
            return
        is_good = answer is not None and answer.status == 200  # noqa: PLR2004 - OK
        if path == LEASE_PATH:
            # Most answers have no job: they are not worth decoding.
            if answer is not None and is_good and b'"jobs":[]' not in answer.body:
                self._leased(call, msgspec.json.decode(answer.body, type=LeaseAnswer))
        elif call.wait_s:
            self._held_ended(call, answer)
        else:
            self._renewed(call, answer if is_good else None)

    def _leased(self, call: _Call, answer: LeaseAnswer) -> None:
        pauses = self.process.pauses
        for job in answer.jobs:
            # The clock of a server may be faster.
            since = min(self.clock.moment(), call.sent_at + max(0, answer.waited_ms))
            self._leases[job.job_id, job.fence] = _JobLease(since, job.lease_ttl_ms, pauses)

    def _held_ended(self, call: _Call, answer: HttpReply | None) -> None:
        took_ms = self.clock.moment() - call.sent_at
        if answer is None:
            # Cancelled, because there are more leases to watch; or failed.
            self._troubled_s = self.process.loop.now_s
            return
        is_lost = b'"lost":[]' not in answer.body
        if answer.status != 200 or (took_ms < _HELD_MS and not is_lost):  # noqa: PLR2004 - OK
            self._troubled_s = self.process.loop.now_s

    def _renewed(self, call: _Call, answer: HttpReply | None) -> None:
        now = self.clock.moment()
        told = None if answer is None else msgspec.json.decode(answer.body, type=RenewAnswer)
        for key, usage in zip(call.keys, call.usage, strict=True):
            known = self._leases.get(key)
            if known is None:
                continue
            known.is_asking = False
            if told is not None and key[0] in told.lost:
                del self._leases[key]
            elif told is not None and key[0] in told.renewed:
                known.good_at, known.failures = call.sent_at, 0
            elif call.is_due or told is not None:
                # A topic limit had no token for it: also if only its usage was sent.
                known.failures += 1
                known.failed_at = now
            if told is not None and usage:
                known.usage = usage

    def _check_due(self, keys: list[tuple[str, int]], now: int) -> None:
        """Compare a renewal that is due with what every lease of the worker needs."""
        check, pauses = self.history.check, self.process.pauses
        for key in keys:
            known = self._leases.get(key)
            if known is not None and known.pauses == pauses:
                said = retried_on_time(key[0], at=now, earliest=known.earliest() - 2)
                check(_IN_TIME, said)
        for key, (job, since_s, _) in self._running.items():
            known = self._leases.get(key)
            if known is None or key in keys or known.is_asking or known.failures:
                continue
            if self.process.loop.now_s - since_s < _BEGUN_S:
                continue  # It came with a late answer, and is renewed in a moment.
            has_news = dict(job.used) != known.usage
            if known.pauses == pauses and job.lost is None and not has_news:
                due_in_ms = known.due_at - now
                check(_IN_TIME, not_left_out(key[0], due_in_ms=due_in_ms + 2, ttl_ms=known.ttl_ms))

    # ── Handlers ─────────────────────────────────────────────────────────────────────────────────

    def begins(self, job: Job) -> None:
        """A handler begins."""
        since = (job, self.process.loop.now_s, self.process.pauses)
        self._running[job.job_id, job.fence] = since

    def goes_on(self, job: Job) -> None:
        """A handler is at work, and its lease is trusted."""
        now_s, key = self.process.loop.now_s, (job.job_id, job.fence)
        known, (_, since_s, pauses) = self._leases.get(key), self._running[key]
        if known is None or pauses != self.process.pauses:
            return
        is_calm = self._troubled_s < since_s - _TROUBLE_S
        if now_s - since_s > _WATCHED_S and is_calm:
            said = f"{job.job_id} was leased {now_s - since_s:.2f} s ago, and no call watches it"
            self.history.check(_WATCH, [] if known.watched else [said])
        late_ms = self.clock.moment() - known.due_at
        is_late = late_ms > _SLACK_MS and not known.is_asking and not known.failures
        if is_late and known.asked_at <= known.due_at and known.pauses == self.process.pauses:
            said = f"{job.job_id} was not renewed for {late_ms} ms after it was due"
            self.history.check(_IN_TIME, [said])

    def ends(self, job: Job) -> None:
        """A handler has ended."""
        self._running.pop((job.job_id, job.fence), None)
