"""The histogram of the event loop is scraped like the client library's."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from stanchion.services.signals import LoopHistogram

_BUCKETS = (0.001, 0.5, 1, 10)
_VALUES = (0.0, 0.001, 0.0011, 0.5, 0.75, 1, 3.5, 10, 10.5, 1e9)


@pytest.mark.parametrize("values", [(), _VALUES])
@pytest.mark.parametrize("labels", [{}, {"route": "/v1/runs", "status": "2xx"}])
def test_it_is_scraped_like_the_librarys(labels: dict[str, str], values: tuple[float, ...]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    mine = LoopHistogram("a_seconds", "Says what.", [*labels], buckets=_BUCKETS, registry=ours)
    their = Histogram("a_seconds", "Says what.", [*labels], buckets=_BUCKETS, registry=theirs)
    series = mine.series(*labels.values())
    child = their.labels(**labels) if labels else their
    for value in values:
        series.observe(value)
        child.observe(value)
    assert _samples(ours) == _samples(theirs)


def test_a_series_without_values_of_its_labels_is_not_there() -> None:
    registry = CollectorRegistry()
    LoopHistogram("a_seconds", "Says what.", ["route"], buckets=_BUCKETS, registry=registry)
    assert _samples(registry) == []


def test_an_exemplar_is_that_of_the_last_value_in_its_bucket() -> None:
    registry = CollectorRegistry()
    series = LoopHistogram("a_seconds", "Says what.", buckets=_BUCKETS, registry=registry).series()
    series.observe(0.6, {"trace_id": "first"})
    series.observe(0.7, {"trace_id": "second"})
    series.observe(0.8)
    series.observe(5)
    shown = generate_openmetrics(registry).decode()  # type: ignore[no-untyped-call] # theirs has no annotations
    assert 'a_seconds_bucket{le="1.0"} 3.0 # {trace_id="second"} 0.7' in shown
    assert shown.count("# {") == 1


def test_two_of_one_name_are_refused() -> None:
    registry = CollectorRegistry()
    LoopHistogram("a_seconds", "Says what.", buckets=_BUCKETS, registry=registry)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        LoopHistogram("a_seconds", "Says what.", buckets=_BUCKETS, registry=registry)


def _samples(registry: CollectorRegistry) -> list[tuple[str, dict[str, str], float]]:
    """All samples but the times of creation, which the server switches off."""
    return sorted(
        (
            (each.name, dict(each.labels), each.value)
            for metric in registry.collect()
            for each in metric.samples
            if not each.name.endswith("_created")
        ),
        key=repr,
    )
