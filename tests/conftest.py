"""How much is tried: `make test` repeats the same examples, `make soak` looks for new ones."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

SOAK = os.environ.get("STANCHION_TEST_SCALE") == "soak"

# A test that fails on one run and passes on the next is broken: in `make test` the examples are
# drawn from a fixed seed. New ones are looked for in `make soak`, where a failure is a find.
settings.register_profile("test", max_examples=100, derandomize=True, deadline=None)
settings.register_profile(
    "soak", max_examples=5_000, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("soak" if SOAK else "test")
