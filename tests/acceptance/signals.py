"""Metrics: what servers count, read as Prometheus would read it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.acceptance.caller import Caller

__all__ = ["Signals", "read_signals"]


class Signals:
    """All samples of all replicas at one moment."""

    def __init__(self, samples: list[tuple[str, Mapping[str, str], float]], names: set[str]):
        self._samples = samples
        self.names = names
        """Of all families, also of those that have no samples yet."""

    def sum(self, name: str, **labels: str) -> float:
        """All samples of this name with these labels, over all replicas and other labels."""
        return sum(
            value
            for sample, has, value in self._samples
            if sample == name and all(has.get(key) == wanted for key, wanted in labels.items())
        )

    def of_tenant(self, name: str, tenant: str, **labels: str) -> float:
        """The same for a tenant. One that came late is counted among the others."""
        return self.sum(name, tenant=tenant, **labels) + self.sum(name, tenant="other", **labels)

    def labels_of(self, name: str) -> set[frozenset[str]]:
        """Which sets of labels samples of this name have."""
        return {frozenset(has) for sample, has, _ in self._samples if sample == name}


async def read_signals(caller: Caller) -> Signals:
    """What every replica says at the moment."""
    samples: list[tuple[str, Mapping[str, str], float]] = []
    names: set[str] = set()
    for number in range(len(caller.urls)):
        for family in await _rendered_now(caller.at(number)):
            names.add(family.name)
            samples += [(each.name, each.labels, each.value) for each in family.samples]
    return Signals(samples, names)


async def _rendered_now(caller: Caller) -> list[Metric]:
    """What the server counts, from a text that it rendered after this was called."""
    asked_s = time.time()
    while True:
        answer = await caller.call("GET", "/metrics")
        assert answer.status == 200, answer.text
        families = list(text_string_to_metric_families(answer.text))
        (rendered,) = (each for each in families if each.name == _RENDERED)
        if rendered.samples[0].value >= asked_s:
            return families
        await asyncio.sleep(0.1)  # a text is answered for a second


_RENDERED = "stanchion_metrics_rendered_timestamp_seconds"
