"""A model of commit, takeover and failover that is small enough for an exhaustive search.

It has one run in a store with a replica, a lock server that may lose its data, and two writers. A
writer takes the lease (or proceeds without one if the lock server is down), reads the run, and
commits its decision. A writer may settle a result without a lease, on the run as it has committed
it last or as it has read it, with the fence that it found there. Events may arrive in the inbox; a
commit applies what its writer has read. At any moment the store may fail over to its replica, and
the lock server may lose its data. Time passes, so that fences from the clock rise; a lease may end
at any moment.

The search visits every order of these steps (breadth first, so a counterexample is a shortest one)
and checks four statements in each state:

* **one chain**: a commit is accepted only if the run is unchanged since its writer read it, in this
  history and not in a lost one. So of two commits decided on the same read, one is accepted.
* **no stale holder**: a commit under a lease is accepted only if no writer with a higher fence has
  written.
* **nothing is overtaken**: a result is settled only while no event is in the inbox.
* **fences rise**: no lock server grants a fence that was granted before, by it or a predecessor.

``search(ModelRules())`` finds no counterexample. If one rule is weakened, it finds one: for
compare-and-set by version only, and for fences from a counter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final, NamedTuple

WRITERS: Final = 2


class ModelRules(NamedTuple):
    """What a commit compares, and how fences are made."""

    compares_nonce: bool = True
    fences_by_clock: bool = True
    checks_fence: bool = True
    checks_inbox: bool = True


class Bounds(NamedTuple):
    """Limits on the number of steps."""

    commits: int = 4
    grants: int = 4
    failovers: int = 1
    losses: int = 1
    events: int = 0


class Found(NamedTuple):
    """The result of a search."""

    states: int
    broken: str | None = None
    story: tuple[str, ...] = ()
    """A shortest sequence of steps that leads to the violation."""


class _Stored(NamedTuple):
    """The run at one server: version, the commit that wrote it, the highest fence, its inbox."""

    version: int = 0
    nonce: int = 0
    fence: int = 0
    has_event: bool = False


class _Writer(NamedTuple):
    fence: int | None = None
    """``None``: no lease, or none needed. Sent with the commit."""
    read: _Stored | None = None
    is_unleased: bool = False
    known: _Stored | None = None
    """The run as this writer committed it last, or read it without a lease."""


class _State(NamedTuple):
    primary: _Stored = _Stored()
    replica: _Stored = _Stored()
    writers: tuple[_Writer, ...] = (_Writer(),) * WRITERS
    owner: int | None = None
    """The holder of the lease, according to the lock server."""
    counter: int = 0
    """The last fence that the lock server has stored."""
    clock: int = 0
    given: tuple[int, ...] = ()
    """All fences that were ever granted."""
    nonces: int = 0
    """The number of commits that were ever accepted, each with its own nonce."""
    failovers: int = 0
    losses: int = 0
    events: int = 0


class _Step(NamedTuple):
    says: str
    state: _State
    broken: str | None = None


_STATES_MAX: Final = 2_000_000


def search(rules: ModelRules, bounds: Bounds = Bounds()) -> Found:  # noqa: B008 - a value
    """Visit every reachable state; returns the shortest path to a violation, if there is one."""
    start = _State()
    came_from: dict[_State, tuple[_State, str] | None] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        for step in _steps(state, rules, bounds):
            if step.broken is not None:
                story = (*_story(came_from, state), step.says)
                return Found(len(came_from), step.broken, story)
            if step.state not in came_from:
                came_from[step.state] = (state, step.says)
                queue.append(step.state)
        if len(came_from) > _STATES_MAX:
            raise RuntimeError(f"more than {_STATES_MAX} states")
    return Found(len(came_from))


def _steps(state: _State, rules: ModelRules, bounds: Bounds) -> Iterator[_Step]:
    for number in range(WRITERS):
        yield from _writer_steps(state, number, rules, bounds)
    if state.replica != state.primary:
        yield _Step("the store's replica catches up", state._replace(replica=state.primary))
        if state.failovers < bounds.failovers:
            yield _Step(
                f"the store fails over from version {state.primary.version}"
                f" to {state.replica.version}",
                state._replace(primary=state.replica, failovers=state.failovers + 1),
            )
    if state.events < bounds.events and not state.primary.has_event:
        arrived = state.primary._replace(has_event=True)
        yield _Step(
            "an event arrives in the inbox",
            state._replace(primary=arrived, events=state.events + 1),
        )
    if state.owner is not None:
        yield _Step("the lease ends", state._replace(owner=None))
    if state.losses < bounds.losses:
        lost = state._replace(owner=None, counter=0, losses=state.losses + 1)
        yield _Step("the lock server loses everything", lost)


def _writer_steps(state: _State, number: int, rules: ModelRules, bounds: Bounds) -> Iterator[_Step]:
    writer, name = state.writers[number], "AB"[number]
    if writer.fence is None and not writer.is_unleased:
        if state.owner is None and len(state.given) < bounds.grants:
            yield _grant(state, number, rules)
        unleased = _put(state, number, _Writer(is_unleased=True))
        yield _Step(f"{name} goes on without a lease", unleased)
        if not state.primary.has_event and writer.known != state.primary:
            learned = _put(state, number, _Writer(known=state.primary))
            yield _Step(f"{name} reads version {state.primary.version} to settle", learned)
        if writer.known is not None:
            settling = writer._replace(read=writer.known, fence=writer.known.fence)
            yield from _commit(state, number, settling, rules, bounds, is_settle=True)
    elif writer.read is None:
        read = _put(state, number, writer._replace(read=state.primary))
        yield _Step(f"{name} reads version {state.primary.version}", read)
    else:
        yield from _commit(state, number, writer, rules, bounds)


def _grant(state: _State, number: int, rules: ModelRules) -> _Step:
    clock = state.clock + 1
    fence = max(state.counter + 1, clock) if rules.fences_by_clock else state.counter + 1
    after = _put(state, number, _Writer(fence=fence))
    after = after._replace(
        owner=number, counter=fence, clock=clock, given=tuple(sorted({*state.given, fence}))
    )
    broken = f"fence {fence} is given out again" if fence in state.given else None
    return _Step(f"{'AB'[number]} gets the lease with fence {fence}", after, broken)


def _commit(
    state: _State,
    number: int,
    writer: _Writer,
    rules: ModelRules,
    bounds: Bounds,
    *,
    is_settle: bool = False,
) -> Iterator[_Step]:
    present, name, read = state.primary, "AB"[number], writer.read
    assert read is not None
    gone = _put(state, number, _Writer())
    if state.owner == number:
        gone = gone._replace(owner=None)
    verb = "settles a result on" if is_settle else "commits what it decided on"
    what = f"{name} {verb} version {read.version}"
    is_stale = rules.checks_fence and writer.fence is not None and writer.fence < present.fence
    is_same = read.version == present.version and (
        not rules.compares_nonce or read.nonce == present.nonce
    )
    would_overtake = is_settle and present.has_event
    if is_stale or not is_same or (would_overtake and rules.checks_inbox):
        yield _Step(f"{what}: refused", gone)
        return
    if state.nonces == bounds.commits:
        return
    nonce = state.nonces + 1
    highest = present.fence if writer.fence is None else max(present.fence, writer.fence)
    broken = None
    if read.nonce != present.nonce:
        broken = "a commit decided on a lost history was accepted"
    elif writer.fence is not None and writer.fence < present.fence:
        broken = "a commit of a stale holder was accepted"
    elif would_overtake:
        broken = "a settled result overtook an event"
    after = _Stored(present.version + 1, nonce, highest, present.has_event and not (read.has_event))
    accepted = _put(gone, number, _Writer(known=after))
    accepted = accepted._replace(primary=after, nonces=nonce)
    yield _Step(f"{what}: accepted", accepted, broken)


def _put(state: _State, number: int, writer: _Writer) -> _State:
    writers = list(state.writers)
    writers[number] = writer
    return state._replace(writers=tuple(writers))


def _story(came_from: dict[_State, tuple[_State, str] | None], state: _State) -> tuple[str, ...]:
    told: list[str] = []
    before = came_from[state]
    while before is not None:
        state, says = before
        told.append(says)
        before = came_from[state]
    return tuple(reversed(told))
