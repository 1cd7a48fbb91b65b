"""A pair: the store under test and the model, kept in step.

The calls of a batch are sent to the store at once. Then an order is looked for in which the model
gives the same answers, one after the other. Several orders may do, and lead to different states:
which one it was shows only later. So when a batch cannot be explained, another order is tried for
the ones before it, the last one first. If nothing helps, the store did something that no order of
indivisible steps explains.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from stanchion.adapters.store.memory import MemoryStore
from stanchion.adapters.system import ManualClock
from stanchion.core.model import Instant
from tests.contract.harness import Harness
from tests.model.call import Call, batches
from tests.model.side import Side

__all__ = ["Disagreement", "Pair"]

_PASS_MS: Final = 3
"""After this, everything short has ended."""
_REBUILDS_MAX: Final = 300
"""How far the search for an explanation goes. It is found at once, or after a few steps."""


class Disagreement(AssertionError):
    """No order of the calls explains the answers."""


class Pair:
    """Two stores that have been through the same."""

    def __init__(self, harness: Harness, began_at: Instant, key_ttl_ms: int) -> None:
        self.subject = Side(harness.store)
        self.trace: list[str] = []
        """Every call and its answer, an empty line after each batch."""
        self._harness = harness
        self._began_at = began_at
        self._key_ttl_ms = key_ttl_ms
        self._past: list[_Batch] = []
        self.model, self._clock = self._fresh()

    @property
    def now(self) -> Instant:
        """The model's time."""
        return self._clock.now()

    async def send(self, calls: Sequence[Call]) -> None:
        """Send calls, as many at once as may be, and let time pass where it matters."""
        for batch in batches(calls):
            await self._send_at_once(batch)
            if any(call.sets is not None for call in batch):
                await self.pass_time()

    async def pass_time(self) -> None:
        """Let everything short end."""
        await self._harness.pass_time(_PASS_MS)
        self._clock.advance(_PASS_MS)
        if self._past:
            self._past[-1].passed_ms += _PASS_MS

    async def _send_at_once(self, calls: Sequence[Call]) -> None:
        finished: list[int] = []

        async def ask(index: int) -> object:
            raw: object = await calls[index].ask(self.subject)
            finished.append(index)
            return raw

        raw = await asyncio.gather(*map(ask, range(len(calls))))
        answers: dict[int, object] = {}
        for index in sorted(range(len(calls)), key=lambda index: not calls[index].teaches):
            answers[index] = calls[index].read(self.subject, raw[index])
        self.trace += [f"{call} -> {_brief(answers[index])}" for index, call in enumerate(calls)]
        self._past.append(_Batch(calls, answers, finished))
        await self._explain()
        self.trace.append("")

    async def _explain(self) -> None:
        """Take the model through the last batch, and if need be anew through those before it."""
        place = len(self._past) - 1
        why: list[str] = []
        rebuilds = 0
        is_level = True
        while rebuilds < _REBUILDS_MAX:
            batch = self._past[place]
            order = next(batch.orders, None)
            if order is None:
                why = why or [f"  the model: {text}" for text in sorted(set(batch.wrong.values()))]
                place -= 1
                if place < 0:
                    break
                is_level = False
                continue
            if not is_level:
                rebuilds += 1
                await self._rebuild(place)
            is_level = await batch.follow(self.model, order)
            if is_level:
                self._clock.advance(batch.passed_ms)
                place += 1
                if place == len(self._past):
                    return
                self._past[place].start_again()
        raise Disagreement("\n".join(["no order explains the last answers", *self.trace, *why]))

    async def _rebuild(self, place: int) -> None:
        """Take a new model to where the old one was before this batch."""
        self.model, self._clock = self._fresh()
        for batch in self._past[:place]:
            for step in batch.chosen:
                step.read(self.model, await step.ask(self.model))
            self._clock.advance(batch.passed_ms)

    def _fresh(self) -> tuple[Side, ManualClock]:
        clock = ManualClock(self._began_at)
        return Side(MemoryStore(clock, key_ttl_ms=self._key_ttl_ms)), clock


class _Batch:
    """Calls that were sent at once, the store's answers, and the order that is believed in."""

    def __init__(
        self, calls: Sequence[Call], answers: Mapping[int, object], finished: Sequence[int]
    ) -> None:
        self._answers = answers
        self._steps = {
            index: call.steps(answers[index]) if len(calls) > 1 else (call,)
            for index, call in enumerate(calls)
        }
        self._finished = finished
        self.chosen: Sequence[Call] = ()
        self.passed_ms = 0
        """The time that passed after it."""
        self.start_again()

    def start_again(self) -> None:
        """Try all orders anew: what was before is another history now."""
        self.wrong: dict[tuple[int, ...], str] = {}
        """How orders begin that are wrong, and what the model said."""
        self.orders = self._untried()

    async def follow(self, model: Side, order: tuple[int, ...]) -> bool:
        """Let the model do this; whether it gave the same answers."""
        done = dict.fromkeys(self._steps, 0)
        chosen: list[Call] = []
        for place, index in enumerate(order):
            step = self._steps[index][done[index]]
            answer = step.read(model, await step.ask(model))
            expected = self._answers[index]
            if len(self._steps[index]) > 1:
                assert isinstance(expected, tuple)
                expected = expected[done[index] : done[index] + 1]
            if answer != expected:
                self.wrong[order[: place + 1]] = f"{step} -> {_difference(answer, expected)}"
                return False
            done[index] += 1
            chosen.append(step)
        self.chosen = chosen
        return True

    def _untried(self) -> Iterator[tuple[int, ...]]:
        # The order in which the answers came is usually the order in which things happened.
        for order in _orders([(index, len(self._steps[index])) for index in self._finished]):
            if not any(order[: len(known)] == known for known in self.wrong):
                yield order


def _brief(answer: object) -> object:
    """An answer as it is shown: a look at everything would hide the rest."""
    return f"{len(answer)} things" if isinstance(answer, dict) else answer


def _difference(answer: object, expected: object) -> object:
    if not isinstance(answer, dict) or not isinstance(expected, dict):
        return answer
    return "".join(
        f"\n    {name}: {answer[name]}\n    the store: {expected.get(name)}"
        for name in answer
        if answer[name] != expected.get(name)
    )


def _orders(lengths: Sequence[tuple[int, int]]) -> Iterator[tuple[int, ...]]:
    """Every way to shuffle the steps of calls into one another, beginning with one by one."""
    if not lengths:
        yield ()
    for place, (index, length) in enumerate(lengths):
        left = [(index, length - 1)] if length > 1 else []
        for rest in _orders([*left, *lengths[:place], *lengths[place + 1 :]]):
            yield (index, *rest)
