"""Sequences of batches of operations, drawn so that most of them meet something to work on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

import msgspec
from hypothesis import strategies as st

from tests.model import jobs, keeping, runs
from tests.model.call import LONG_MS, SHORT_MS
from tests.model.plans import WORKFLOWS
from tests.model.world import Operation

__all__ = ["Story", "stories"]

_Each = TypeVar("_Each")


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """One example: what is done, batch after batch."""

    tenants_share_a_shard: bool
    key_ttl_ms: int
    caps: tuple[int, ...]
    """What the tenants may do at first."""
    batches: tuple[tuple[Operation, ...], ...]

    def __repr__(self) -> str:
        lines = [f"    {', '.join(map(repr, batch))}" for batch in self.batches]
        shard = "one shard" if self.tenants_share_a_shard else "several shards"
        first = f"Story({shard}, caps {self.caps}, keys last {self.key_ttl_ms} ms:"
        return "\n".join([first, *lines, ")"])


def _often(*values: _Each) -> st.SearchStrategy[_Each]:
    """Of these: a value that is written twice comes twice as often."""
    return st.sampled_from(values)


_TENANT: Final = _often(0, 0, 0, 0, 0, 1, 1, 2)
_CAP: Final = _often(1, 2, 3)
_WORKFLOW: Final = _often(*WORKFLOWS)
_RECENT: Final = _often(0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 5, 99)
_RARELY: Final = _often(False, False, False, True)
_OFTEN: Final = _often(False, True)
_EVENT: Final = _often("approve", "approve", "reject", "cancel")

_ADMIT: Final = st.builds(
    runs.Admit,
    tenant=_TENANT,
    workflow=_WORKFLOW,
    key=_often(None, None, None, 0, 0, 1),
    say=_often(0, 0, 0, 1),
    knows=_often(None, None, None, None, "newest", "other"),
    takes_slot=_often(True, True, True, False),
    is_rate_limited=_RARELY,
    past=_OFTEN,
)
_ADVANCE: Final = st.builds(
    runs.Advance,
    run=_RECENT,
    also=_often(None, None, None, None, "approve", "reject", "cancel"),
    fence=_often(None, 1, 2, 3),
    is_late=_RARELY,
    past=_OFTEN,
)
_LEASE: Final = st.builds(
    jobs.Lease, queue=_often(0, 0, 0, 1, 2, 9), max_jobs=_often(1, 1, 2, 3), is_short=_OFTEN
)
_ANSWER: Final = st.builds(
    jobs.Answer,
    grant=_RECENT,
    how=_often("succeeded", "succeeded", "failed", "final"),
    whose=_often("holder", "holder", "holder", "holder", "nobody", "unknown job"),
)
_ACCEPT: Final = st.builds(
    jobs.Accept,
    answers=st.lists(_ANSWER, min_size=1, max_size=2).map(tuple),
    is_later=_RARELY,
)
_PICKS: Final = st.lists(_RECENT, min_size=1, max_size=2).map(tuple)
_NAME: Final = _often("a", "b")

_WEIGHTED: Final[Sequence[tuple[int, st.SearchStrategy[Operation]]]] = (
    # The first one is what a failing story shrinks to.
    (1, st.builds(runs.Active, tenant=_TENANT)),
    (2, st.builds(runs.Look, run=_RECENT)),
    (14, _ADMIT),
    (12, _LEASE),
    (12, _ACCEPT),
    (16, _ADVANCE),
    (5, st.builds(keeping.Again, call=_often(0, 0, 1, 1, 2, 3, 5, 8))),
    (8, st.builds(jobs.Expire, max_deliveries=_often(1, 2))),
    (4, st.just(keeping.FireTimers())),
    (7, st.builds(keeping.Take, is_short=_OFTEN)),
    (3, st.builds(jobs.Renew, grants=_PICKS, is_short=_OFTEN)),
    (1, st.builds(jobs.ViewJob, grant=_RECENT)),
    (8, st.builds(runs.Post, run=_RECENT, event=_EVENT, entry=_often(0, 1))),
    (1, st.builds(runs.ListRuns, tenant=_TENANT, workflow=st.none() | _WORKFLOW)),
    (4, st.builds(keeping.Confirm, rows=_PICKS)),
    (6, st.builds(keeping.Defer, row=_RECENT, is_short=_OFTEN)),
    (3, st.builds(keeping.Bury, run=_RECENT, entry=_often(0, 1))),
    (2, st.builds(keeping.CountFailure, run=_RECENT, entry=_often(0, 1))),
    (1, st.builds(keeping.ListLetters, tenant=_TENANT)),
    (4, st.builds(keeping.Replay, letter=_often(0, 1, 2), is_discard=_OFTEN)),
    (
        3,
        st.builds(
            keeping.PutWorkflow,
            tenant=st.none() | _TENANT,
            workflow=_WORKFLOW,
            text=_often(0, 1),
        ),
    ),
    (
        2,
        st.builds(
            keeping.PutTenant,
            tenant=_TENANT,
            cap=_often(1, 2, 3, None),
            is_slow=_OFTEN,
            pin=st.none() | _WORKFLOW,
        ),
    ),
    (
        2,
        st.builds(
            keeping.PutDocument,
            name=_NAME,
            value=_often(0, 1),
            read=_often("whatever", "nothing", "present", "present", "older"),
        ),
    ),
    (1, st.builds(keeping.DeleteDocument, name=_NAME)),
    (1, st.just(keeping.Audit())),
    (2, st.builds(keeping.Purge, is_full=_OFTEN)),
)
# ``one_of`` forgets how often it was given the same strategy, so the weights are drawn first.
_OPERATIONS: Final = st.sampled_from(
    [number for number, (weight, _) in enumerate(_WEIGHTED) for _ in range(weight)]
).flatmap(lambda number: _WEIGHTED[number][1])
_BATCH: Final = st.lists(_OPERATIONS, max_size=4).map(tuple)


@st.composite
def stories(draw: st.DrawFn) -> Story:
    """A story, in which an empty batch is nothing at all."""
    batches = draw(st.lists(_BATCH, min_size=10, max_size=20))
    return Story(
        tenants_share_a_shard=draw(_often(True, True, False)),
        key_ttl_ms=draw(_often(LONG_MS, LONG_MS, SHORT_MS)),
        caps=draw(st.tuples(_CAP, _CAP, _CAP)),
        batches=tuple(batch for batch in batches if batch),
    )
