"""``make bench``: print one table, write it as JSON and as a picture, fail if a promise is broken.

    python -m bench [GROUP …] [--quick] [--record]

Groups, and which of them take minutes, are listed by ``--help``. ``--quick`` measures briefly and
skips those unless they are named; its figures are not recorded.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from bench import (
    cli,
    console,
    core,
    fan,
    flow,
    growth,
    http,
    idle,
    leases,
    limits,
    memory,
    queue,
    record,
    redis_client,
    renewals,
    steps,
    stores,
    storm,
    telemetry,
    tenants,
)
from bench.pace import FULL, QUICK, Pace
from bench.picture import picture
from bench.row import Row, failed, table

__all__ = ["GROUPS", "Group", "main"]

REPORTS: Final = Path("reports")


class Group(msgspec.Struct, frozen=True):
    """Rows that are measured together."""

    name: str
    rows: Callable[[Pace], list[Row]]
    is_long: bool = False


GROUPS: Final = (
    Group("core", lambda _: core.rows()),
    Group("steps", lambda _: steps.rows()),
    Group("cli", lambda _: cli.rows()),
    Group("leases", lambda _: leases.rows()),
    Group("renewals", renewals.rows),
    Group("http", http.rows),
    Group("storm", storm.rows),
    Group("tenants", tenants.rows),
    Group("neighbours", tenants.neighbour_rows),
    Group("flow", flow.rows, is_long=True),
    Group("idle", idle.rows),
    Group("limits", limits.rows),
    Group("queue", queue.rows),
    Group("fan", fan.rows),
    Group("memory", memory.rows),
    Group("stores", lambda _: stores.rows(), is_long=True),
    Group("console", console.rows),
    Group("telemetry", telemetry.rows),
    Group("redis", redis_client.rows),
    Group("growth", growth.rows, is_long=True),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, and return the exit code."""
    asked = _parser().parse_args(arguments)
    unknown = set(asked.groups) - {group.name for group in GROUPS}
    if unknown or (asked.quick and asked.record):
        words = f"no such group: {', '.join(sorted(unknown))}" if unknown else "a quick look"
        print(f"{words}; --help lists the groups, and only full runs are recorded", file=sys.stderr)
        return 2
    rows = _measured(_chosen(asked.groups, is_quick=asked.quick), QUICK if asked.quick else FULL)
    before = record.read()
    print("\n" + table(rows, None if before is None else before.rows))
    _write(rows)
    if asked.record:
        record.write(rows)
        print(f"\nrecorded in {record.RECORD.name}")
    return _verdict(rows, before)


def _parser() -> argparse.ArgumentParser:
    names = ", ".join(group.name + (" (long)" if group.is_long else "") for group in GROUPS)
    parser = argparse.ArgumentParser(prog="python -m bench", epilog=f"groups: {names}")
    parser.add_argument("groups", nargs="*", metavar="GROUP", help="only these; default: all")
    parser.add_argument("--quick", action="store_true", help="brief, without long groups")
    parser.add_argument("--record", action="store_true", help="write bench/results.json")
    return parser


def _chosen(names: Sequence[str], *, is_quick: bool) -> list[Group]:
    if names:
        return [group for group in GROUPS if group.name in names]
    return [group for group in GROUPS if not (is_quick and group.is_long)]


def _measured(groups: Sequence[Group], pace: Pace) -> list[Row]:
    rows: list[Row] = []
    for group in groups:
        print(f"{group.name} …", end="", flush=True, file=sys.stderr)
        began_s = time.perf_counter()
        try:
            rows += group.rows(pace)
        except Exception as error:  # noqa: BLE001 - one group must not cost the others their figures
            traceback.print_exc()
            rows.append(failed(group.name, error))
        print(f" {time.perf_counter() - began_s:.0f} s", file=sys.stderr)
    return rows


def _write(rows: Sequence[Row]) -> None:
    REPORTS.mkdir(exist_ok=True)
    (REPORTS / "bench.json").write_bytes(msgspec.json.format(msgspec.json.encode(rows)))
    grown = [row for row in rows if row.name.startswith(growth.BEGINS) and row.pair]
    if grown:
        drawn = picture(grown, title="Throughput as the store grows", floor=growth.FLOOR)
        (REPORTS / "bench.svg").write_text(drawn)


def _verdict(rows: Sequence[Row], before: record.Record | None) -> int:
    skipped = [row for row in rows if row.skipped]
    broken = [row for row in rows if not row.holds]
    fallen = record.worse(rows, before)
    for name in fallen:
        print(f"behind its record: {name}")
    print(
        f"\n{len(rows)} rows written to {REPORTS / 'bench.json'}: {len(broken)} promises broken,"
        f" {len(skipped)} not measured, {len(fallen)} behind their record"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    # On SIGTERM, also stop the servers that were started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
