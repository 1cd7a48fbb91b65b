"""The operating system's chance, as far as chance can be tested."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from stanchion.adapters.system import SystemEntropy
from stanchion.ports.entropy import Entropy


def test_a_unit_is_below_one_and_not_below_zero() -> None:
    entropy: Entropy = SystemEntropy()
    drawn = [entropy.unit() for _ in range(2_000)]
    assert all(0 <= each < 1 for each in drawn)
    # Off by this much in one of 10^100 runs.
    assert min(drawn) < 0.2
    assert max(drawn) > 0.8
    assert len(set(drawn)) == 2_000


def test_tokens_are_not_drawn_twice() -> None:
    entropy = SystemEntropy()
    drawn = {entropy.token() for _ in range(2_000)}
    assert len(drawn) == 2_000
    assert all(len(token) >= 32 for token in drawn)


def test_a_forked_child_draws_other_tokens_than_its_parent() -> None:
    entropy = SystemEntropy()
    entropy.token()  # from here on there is a stock
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(there, entropy.token().encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(here, 100).decode() != entropy.token()
    os.close(here)
    os.close(there)


def test_threads_never_draw_the_same_token() -> None:
    entropy = SystemEntropy()
    with ThreadPoolExecutor(8) as threads:
        drawn = list(threads.map(lambda _: entropy.token(), range(20_000)))
    assert len(set(drawn)) == len(drawn)
