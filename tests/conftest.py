"""How much is tried: `make test` repeats the same examples, `make soak` looks for new ones."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

SOAK = os.environ.get("STANCHION_TEST_SCALE") == "soak"

# A test that fails on one run and passes on the next is broken: in `make test` the examples are
# drawn from a fixed seed. New ones are looked for in `make soak`, where a failure is a find.
# No profile judges times: a busy machine would fail examples that are right.
_NO_TIMES = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("test", _NO_TIMES, max_examples=100, derandomize=True)
settings.register_profile("soak", _NO_TIMES, max_examples=5_000)
settings.load_profile("soak" if SOAK else "test")

# pytest-xdist sets it for its workers, and the command line would fit its tables to it.
os.environ.pop("COLUMNS", None)

# A shell that puts the suite into the background has it ignore Ctrl-C, and every process that it
# starts inherits that: the tests that press it would wait for nothing.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def as_in_a_server() -> Iterator[None]:
    """The garbage collector as a server sets it, which passes over what tests have loaded."""
    from stanchion.assemble import GC_THRESHOLDS  # noqa: PLC0415 - few tests need a server's modules

    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()
