"""The ledger of queues: a record of the runs that wait for a slot, independent of the store.

It adds a run when the store has answered ``Queued``, and after every command compares the runs that
have left the store's queue with those whose turn it was. So it sees a run that is overtaken, one
that is promoted twice or forgotten, and a slot that is free while a run waits, and no promoted run
is left whose first decision would promote it.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from stanchion.adapters.store.memory.state import Account, MemoryState
from stanchion.core.admission import Queued
from stanchion.core.model import Run, RunId, RunStatus, TenantId
from stanchion.core.queue import PROMOTED_ENTRY, QUEUE_TIMEOUT, FairQueue
from stanchion.ports.records import Admission
from stanchion.sim.history import History


@dataclass(slots=True)
class QueueLedger:
    """The record of all tenants' queues."""

    queues: dict[TenantId, FairQueue] = field(default_factory=dict)
    promoted: Counter[RunId] = field(default_factory=Counter)

    def queued(self, admission: Admission, answer: Queued, history: History) -> None:
        """Record a run that waits, and check what its caller is told."""
        queue = self.queues.setdefault(admission.run.tenant, FairQueue())
        queue.add(answer.run_id, admission.queue)
        position = queue.position(answer.run_id)
        said = f"run {answer.run_id} was told position {answer.position}, and has {position}"
        history.check("a place is what it is", [] if answer.position == position else [said])

    def observe(self, state: MemoryState, history: History) -> list[Run]:
        """Compare the record with the store after a command; the runs that were promoted."""
        promoted: list[Run] = []
        for tenant, queue in self.queues.items():
            account = state.peek(tenant)
            if queue or account.queue:
                promoted += self._compare(tenant, queue, account, state, history)
        return promoted

    def changed(self, before: Run, after: Run, history: History) -> None:
        """Check that only a run that waits can time out in the queue."""
        is_wrong = gave_up_waiting(after) and before.status is not RunStatus.QUEUED
        said = f"run {after.id} was {before.status}, and timed out in the queue"
        history.check("a time-out does not win against a promotion", [said] if is_wrong else [])

    def failed_over(self, state: MemoryState) -> None:
        """Take over what the store has after it lost its last writes."""
        self.queues = {
            tenant: copy.deepcopy(account.queue) for tenant, account in state.accounts.items()
        }
        self.promoted.clear()

    def _compare(
        self,
        tenant: TenantId,
        queue: FairQueue,
        account: Account,
        state: MemoryState,
        history: History,
    ) -> list[Run]:
        left: list[Run] = []
        for run_id in list(queue):
            run = state.runs[run_id].run
            if run.status.is_finished:
                queue.remove(run_id)
            elif run.status is not RunStatus.QUEUED:
                left.append(run)
        due = {queue.take() for _ in left}
        overtakers = [run.id for run in left if run.id not in due]
        for run_id in overtakers:
            queue.remove(run_id)
        self.promoted.update(run.id for run in left)
        history.check(
            "nobody overtakes",
            [f"run {run_id} of {tenant} had its slot before its turn" for run_id in overtakers],
        )
        history.check("who waits is in the queue", _same_runs(tenant, queue, account))
        idles = (
            len(account.queue) > 0
            and account.has_free_slot
            and not any(PROMOTED_ENTRY in state.runs[each].inbox for each in account.holders)
        )
        said = f"{tenant}: {account.active} slots are used, and {len(account.queue)} runs wait"
        history.check("no slot idles while a run waits", [said] if idles else [])
        history.check(
            "nobody is promoted twice",
            [f"run {run.id} was promoted again" for run in left if self.promoted[run.id] > 1],
        )
        return left


def gave_up_waiting(run: Run | None) -> bool:
    """Whether the run timed out in the queue, so that its key may have another run."""
    return run is not None and run.error is not None and run.error.code == QUEUE_TIMEOUT


def _same_runs(tenant: TenantId, queue: FairQueue, account: Account) -> Iterator[str]:
    if set(queue) != set(account.queue):
        missing = sorted(set(queue) - set(account.queue))
        more = sorted(set(account.queue) - set(queue))
        yield f"the queue of {tenant} lacks {missing}, and has {more} that do not wait"
