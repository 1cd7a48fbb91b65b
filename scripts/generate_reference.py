"""Write docs/reference/cli.md, and the tables in configuration.md and metrics.md beside it.

Run it after a change of a command, an option or a metric; tests compare the pages with its output.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from stanchion.adapters.bus.local import LocalBus
from stanchion.adapters.locks.memory import MemoryLocks
from stanchion.adapters.store.memory import MemoryStore
from stanchion.adapters.system import SystemClock, SystemEntropy
from stanchion.cli.app import app
from stanchion.config import OPTIONS, Config, Option
from stanchion.gateway import make_app
from stanchion.services.context import Backends
from stanchion.services.engine import Engine

__all__ = [
    "CLI_PAGE",
    "CONFIGURATION_PAGE",
    "METRICS_PAGE",
    "cli_text",
    "configuration_text",
    "metric_labels",
    "metric_names",
    "metrics_text",
]

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"
CLI_PAGE = REFERENCE / "cli.md"
CONFIGURATION_PAGE = REFERENCE / "configuration.md"
METRICS_PAGE = REFERENCE / "metrics.md"

_OPENING = """\
# Command line

<!-- Written by scripts/generate_reference.py from the commands themselves. -->

`serve`, `worker`, `drill` and `sim` run processes, and `workflow check` only reads files. Every
other command sends a few HTTP requests to a server and never opens a store.

Flags and variables for the server and the caller:

| flag | environment | meaning |
|---|---|---|
| `--url` | `STANCHION_URL` | the server, `http://127.0.0.1:8420` by default |
| `--api-key` | `STANCHION_API_KEY` | the key; prefer the variable, other users can read a flag |
| | `STANCHION_API_KEY_FILE` | a file that holds the key; not together with the variable |
| `--tenant` | `STANCHION_TENANT` | the tenant, where the key does not say which |

The default output is lines and tables, in colour on a terminal (`NO_COLOR` disables it). With `-o
json` the output is the server's response as one JSON document, in the schema of the HTTP API; an
error is a problem document on standard error. Hints go to standard error.

`--url` may name several servers of one deployment, separated by commas. The first that answers is
used. The command switches to the next if a server refuses the connection, drains, or does not
answer a request that can be sent twice.

There are no other retries. Commands that start runs or submit a job send an idempotency key, a
generated one by default. If a response is lost they print the key; a retry with the same key
creates no second run.

## Exit codes

| code | meaning |
|---|---|
| 0 | done |
| 1 | refused, or the run that was watched did not succeed |
| 2 | wrong usage or configuration |
| 3 | not found (404) |
| 4 | full: a cap or a rate is reached, retry later (429) |
| 5 | unavailable: no answer, or the server cannot (5xx) |
| 130 | interrupted |
"""


def cli_text() -> str:
    """The page about the command line."""
    sections = [_OPENING.rstrip("\n")]
    for depth, path, command in _commands(app, "stanchion", 1):
        context = click.Context(command, info_name=path, max_content_width=90, terminal_width=90)
        context.help_option_names = ["-h", "--help"]
        sections.append(f"{'#' * (depth + 1)} {path}\n\n```text\n{command.get_help(context)}\n```")
    return "\n\n".join(sections) + "\n"


def _commands(
    command: click.Command, path: str, depth: int
) -> Iterator[tuple[int, str, click.Command]]:
    yield depth, path, command
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=path)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from _commands(below, f"{path} {name}", min(depth + 1, 3))


def configuration_text() -> str:
    """The configuration page with its table regenerated; the other text is unchanged."""
    rows = "\n".join(_row(option) for option in OPTIONS)
    table = f"| setting | values | default | meaning |\n|---|---|---|---|\n{rows}"
    return _with_table(CONFIGURATION_PAGE, "options", table)


def _with_table(page: Path, name: str, table: str) -> str:
    """A page with the table between its two marks replaced."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(f"<!-- {name} -->")
    _, end, after = rest.partition(f"<!-- /{name} -->")
    assert begin
    assert end
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"


def _row(option: Option) -> str:
    twin = f" Also from a file: `{option.file_variable}`." if option.is_secret else ""
    return f"| `{option.name}` | {_values(option)} | {_default(option)} | {option.help}{twin} |"


def _values(option: Option) -> str:
    match option.kind:
        case "int":
            return f"{option.least:g} to {option.most:.0f}"
        case "seconds":
            return f"{option.least:g} to {option.most:.0f} s"
        case "switch":
            return "`true`, `false`"
        case "choice":
            return ", ".join(f"`{choice}`" for choice in option.choices)
        case "url":
            return "a URL"
        case "text":
            return option.form


def _default(option: Option) -> str:
    default = getattr(Config(), option.name)
    if default is None or option.name == "data_dir":
        return "–"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default:.10g}`" if isinstance(default, float) else f"`{default}`"


class Metric(msgspec.Struct, frozen=True, order=True):
    """One scraped metric."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


def metrics_text() -> str:
    """The metrics page with its table regenerated; the other text is unchanged."""
    rows = "\n".join(
        f"| `{metric.name}` | {metric.kind} | {_labels(metric.labels)} | {metric.help} |"
        for metric in _metrics()
    )
    return _with_table(
        METRICS_PAGE, "metrics", f"| metric | type | labels | meaning |\n|---|---|---|---|\n{rows}"
    )


def metric_names() -> set[str]:
    """All metrics, by their scraped name."""
    return {metric.name for metric in _metrics()}


def metric_labels() -> dict[str, tuple[str, ...]]:
    """The labels of every metric, by its scraped name."""
    return {metric.name: metric.labels for metric in _metrics()}


def _metrics() -> list[Metric]:
    """The metrics in a server's registry before its first request."""
    clock = SystemClock()
    store = MemoryStore(clock, key_ttl_ms=1)
    wires = Backends(
        store=store,
        locks=MemoryLocks(clock),
        bus=LocalBus(store, clock),
        clock=clock,
        entropy=SystemEntropy(),
    )
    services = Engine("reference", wires).services
    make_app(services)
    found = []
    for collector in services.registry._collector_to_names:  # noqa: SLF001 - labels are not public
        labels = tuple(getattr(collector, "_labelnames", ()))
        for family in collector.collect():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            found.append(Metric(name, family.type, labels, family.documentation))
    return sorted(found)


def _labels(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "–"


if __name__ == "__main__":
    CLI_PAGE.write_text(cli_text(), encoding="utf-8")
    CONFIGURATION_PAGE.write_text(configuration_text(), encoding="utf-8")
    METRICS_PAGE.write_text(metrics_text(), encoding="utf-8")
    sys.stdout.write(f"wrote {CLI_PAGE.name}, {CONFIGURATION_PAGE.name}, {METRICS_PAGE.name}\n")
