"""``make bench``: print one table, write it as JSON, fail if a promise does not hold."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from bench import core, leases, stores
from bench.row import table

REPORT = Path("reports/bench.json")


def main() -> int:
    """Measure everything."""
    rows = [*core.rows(), *leases.rows(), *stores.rows()]
    print(table(rows))
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_bytes(msgspec.json.format(msgspec.json.encode(rows)))
    broken = [row.name for row in rows if not row.holds]
    print(f"\n{len(rows)} rows written to {REPORT}; {len(broken)} promises broken")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
