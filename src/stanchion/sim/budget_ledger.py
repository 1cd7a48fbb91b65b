"""The record of budgets: what runs reserve and use, derived from the commands of the store.

It adds up runs and reports one by one, without ``core.budget``, and compares the sums with the
tallies that the store keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from stanchion.core.admission import Admitted, Queued
from stanchion.core.budget import BudgetWindow, OverBudget
from stanchion.core.model import RunId, TenantId
from stanchion.ports.records import (
    Accepted,
    Admission,
    Commit,
    Committed,
    JobLease,
    Renewals,
    Result,
)
from stanchion.sim.history import History
from stanchion.sim.servers import StoreServer

__all__ = ["BUDGET_VERBS", "BudgetLedger"]

BUDGET_VERBS: Final = frozenset({"admit", "admit_many", "renew_jobs", "accept", "settle", "commit"})
"""The commands that reserve or use."""
_HOUR_MS: Final = 3_600_000
_COUNTS: Final = "budgets count what runs reserve and use"


@dataclass(slots=True)
class _Spending:
    """One run and one budget."""

    tenant: TenantId
    name: str
    generation: int
    """Of the window in which the run was admitted: its number among those of the budget."""
    reserved: int
    used: int = 0
    is_over: bool = False

    @property
    def committed(self) -> int:
        return self.used if self.is_over else max(self.reserved, self.used)


@dataclass(slots=True)
class BudgetLedger:
    """What every run has reserved and used."""

    history: History
    store: StoreServer
    _runs: dict[RunId, list[_Spending]] = field(default_factory=dict)
    _windows: dict[tuple[TenantId, str], tuple[BudgetWindow, int, int]] = field(
        default_factory=dict
    )
    """The window of the last admission: its kind, its hour or 0, and its generation."""
    _reports: dict[tuple[str, int], dict[str, int]] = field(default_factory=dict)
    """The largest reports that the store has taken, by job and fence."""
    _ever: dict[tuple[str, int], dict[str, int]] = field(default_factory=dict)
    """The same, with those that a failover has lost."""

    def stored(self, verb: str, arguments: tuple[Any, ...], answer: object) -> None:
        """The store has executed a command."""
        match verb, answer:
            case "admit", Admitted() | Queued() | OverBudget():
                self._admitted(arguments[0], answer)
                self.compare(arguments[0].run.tenant)
            case "admit_many", (_, *_):
                # Compared at the end: the store has admitted all of them in one step.
                for admission, verdict in zip(arguments[0], answer, strict=True):
                    if isinstance(verdict, Admitted | Queued | OverBudget):
                        self._admitted(admission, verdict)
                self.compare(arguments[0][0].run.tenant)
            case "renew_jobs", Renewals(renewed=renewed):
                self._reported(each for each in arguments[0] if each.job_id in renewed)
            case "accept", tuple():
                pairs = zip(arguments[0], answer, strict=True)
                self._reported(
                    each for each, said in pairs if isinstance(said, Accepted) and not said.repeated
                )
            case "settle", Committed():
                self._committed(arguments[1], results=arguments[0])
            case "commit", Committed():
                self._committed(arguments[0])
            case _:
                pass

    def told_accepted(self, job_id: str, fence: int, usage: Mapping[str, int]) -> None:
        """A worker was told that its result is accepted: then so is what it used."""
        taken = self._ever.get((job_id, fence), {})
        self.history.check(
            "what workers report is charged",
            [
                f"{job_id}: {amount} of '{name}' were reported, {taken.get(name, 0)} are charged"
                for name, amount in usage.items()
                if taken.get(name, 0) < amount and self._is_known(job_id, name)
            ],
        )

    def failed_over(self) -> None:
        """The store has lost its last writes: take over its state."""
        state = self.store.real.state
        self._runs, self._reports, self._windows = {}, {}, {}
        for run_id, file in state.runs.items():
            for name, each in file.reservations.items():
                self._runs.setdefault(run_id, []).append(
                    _Spending(file.run.tenant, name, each.generation, each.reserved, each.used)
                )
        for job in state.jobs.values():
            if job.usage:
                self._reports[job.job.id, job.fence] = dict(job.usage)
        # What runs used that have ended cannot be told apart any more.
        for tenant, account in state.accounts.items():
            for name, tally in account.budgets.items():
                hour, generation = tally.start // _HOUR_MS, tally.generation
                self._windows[tenant, name] = (tally.window, hour, generation)
                rest = tally.used - sum(each.used for each in self._of(tenant, name, generation))
                ended = _Spending(tenant, name, generation, 0, rest, is_over=True)
                self._runs.setdefault(RunId(f"ended {tenant}"), []).append(ended)

    def compare(self, tenant: TenantId) -> None:
        """Compare the tallies of a tenant with the sums over its runs."""
        self.history.check(_COUNTS, self._differences(tenant))

    def _admitted(self, admission: Admission, answer: object) -> None:
        run, state = admission.run, self.store.real.state
        config = state.peek(run.tenant).config
        limits = {} if config is None else config.budgets
        if isinstance(answer, OverBudget):
            limit = limits[answer.budget]
            *_, generation = self._present(run.tenant, answer.budget, limit.window)
            spent = sum(each.committed for each in self._of(run.tenant, answer.budget, generation))
            is_right = spent + admission.budget[answer.budget] > limit.limit
            said = [f"{run.tenant} was refused with {spent} of {limit.limit}, {answer}"]
            self.history.check("no budget is refused that has room", [] if is_right else said)
            return
        if run.id in self._runs or not limits:
            return
        is_over = isinstance(answer, Admitted) and run.status.is_finished
        for name, limit in limits.items():
            present = self._present(run.tenant, name, limit.window)
            self._windows[run.tenant, name] = present
            reserved = admission.budget.get(name, 0)
            spending = _Spending(run.tenant, name, present[2], reserved, is_over=is_over)
            self._runs.setdefault(run.id, []).append(spending)
            spent = sum(each.committed for each in self._of(run.tenant, name, present[2]))
            is_above = name in admission.budget and spent > limit.limit
            said = [f"run {run.id} was admitted with {spent} of {limit.limit} of '{name}'"]
            self.history.check("never above a budget", said if is_above else [])

    def _reported(self, reports: Iterable[JobLease | Result]) -> None:
        # Compared at the end: the store has charged all of them in one step.
        for tenant in self._charged(reports):
            self.compare(tenant)

    def _charged(self, reports: Iterable[JobLease | Result]) -> dict[TenantId, None]:
        """Charge the reports; returns the tenants."""
        tenants: dict[TenantId, None] = {}
        for each in reports:
            if not each.usage:
                continue
            key = (str(each.job_id), each.fence)
            before = self._reports.setdefault(key, {})
            ever = self._ever.setdefault(key, {})
            spendings = self._runs.get(RunId(each.job_id.partition(":")[0]), [])
            for name, amount in each.usage.items():
                more = max(0, amount - before.get(name, 0))
                before[name] = max(amount, before.get(name, 0))
                ever[name] = max(amount, ever.get(name, 0))
                for spending in spendings:
                    if spending.name == name and not spending.is_over:
                        spending.used += more
            tenants |= {spending.tenant: None for spending in spendings}
        return tenants

    def _committed(self, commit: Commit, results: Sequence[Result] = ()) -> None:
        tenants = self._charged(results)
        for each in self._runs.get(commit.run_id, []):
            tenants[each.tenant] = None
            each.is_over = each.is_over or commit.transition.status.is_finished
        for tenant in tenants:
            self.compare(tenant)

    def _differences(self, tenant: TenantId) -> Iterator[str]:
        for name, tally in self.store.real.state.peek(tenant).budgets.items():
            *_, generation = self._windows[tenant, name]
            of_window = self._of(tenant, name, generation)
            used = sum(each.used for each in of_window)
            held = sum(each.committed for each in of_window) - used
            if (used, held) != (tally.used, tally.held):
                yield (
                    f"{tenant}: {used} of '{name}' are used and {held} held, and the store counts"
                    f" {tally.used} and {tally.held}"
                )

    def _of(self, tenant: TenantId, name: str, generation: int) -> list[_Spending]:
        return [
            each
            for spendings in self._runs.values()
            if spendings and spendings[0].tenant == tenant  # all of a run have its tenant
            for each in spendings
            if each.generation == generation and each.name == name
        ]

    def _present(
        self, tenant: TenantId, name: str, window: BudgetWindow
    ) -> tuple[BudgetWindow, int, int]:
        """The window of an admission now: another hour or kind begins another generation."""
        assert window in {BudgetWindow.HOUR, BudgetWindow.TOTAL}, "the workload has no others"
        hour = 0 if window is BudgetWindow.TOTAL else self.store.clock.now() // _HOUR_MS
        *last, generation = self._windows.get((tenant, name), (None, 0, 0))
        return window, hour, generation if last == [window, hour] else generation + 1

    def _is_known(self, job_id: str, name: str) -> bool:
        spendings = self._runs.get(RunId(job_id.partition(":")[0]), [])
        return any(each.name == name for each in spendings)
