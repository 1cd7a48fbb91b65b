"""``python -m bench.peers [install]``: install the peers, or measure them alone."""

from __future__ import annotations

import sys

from bench.peers.installing import install
from bench.peers.running import PEERS

__all__: list[str] = []

SECONDS = 5.0


def main() -> int:
    """Run the command; return the exit code."""
    if sys.argv[1:] == ["install"]:
        return install()
    for peer in PEERS:
        if peer.missing:
            print(f"{peer.name}: {peer.missing}")
            continue
        ran = peer.measure(SECONDS)
        print(f"{peer.name}: {ran.per_s:,.0f} runs/s, p99 {ran.percentile_ms(0.99):,.0f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
