"""``stanchion serve``: all roles in one process."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from stanchion.cli.errors import CliError, Exit, needs_server_packages
from stanchion.cli.logging import log_to, raise_open_files_limit
from stanchion.cli.text import pairs
from stanchion.config import OPTIONS, Config, config_file, load
from stanchion.core.faults import Fault
from stanchion.core.url import shown_url

_F = TypeVar("_F", bound=Callable[..., Any])


def _with_every_option(function: _F) -> _F:
    # All of them are text here: ``config`` checks them as it checks the file and the environment.
    for option in reversed([option for option in OPTIONS if option.has_flag]):
        default = getattr(Config(), option.name)
        shown = option.name != "data_dir" and default is not None
        extra = f"env var: {option.variable}" + (f"; default: {_text(default)}" if shown else "")
        help_text = f"{option.help}  [{extra}]"
        is_switch = option.kind == "switch"
        decorate = click.option(
            option.flag,
            option.name,
            metavar=None if is_switch else option.metavar,
            is_flag=is_switch,
            flag_value="true" if is_switch else None,
            default=None,
            help=help_text,
        )
        function = decorate(function)
    return function


def _text(default: object) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:.10g}" if isinstance(default, float) else str(default)


@click.command("serve")
@_with_every_option
@click.option(
    "--config",
    "config_flag",
    metavar="FILE",
    help="TOML file with the same names, '_' for '-'.  [env var: STANCHION_CONFIG; default:"
    " ./stanchion.toml if it is there]",
)
def serve(config_flag: str | None, **flags: str | None) -> int:
    """Run a server.

    All roles in one process. Several against the same Redis and NATS are replicas. A flag wins over
    its environment variable, that over the file, and that over the default.
    """
    file = config_file(config_flag, os.environ, Path.cwd())
    if isinstance(file, tuple):
        raise _misconfigured(file)
    config = load(flags, os.environ, file)
    if isinstance(config, tuple):
        raise _misconfigured(config)
    log_to(sys.stderr, level=config.log_level, format=config.log_format)
    raise_open_files_limit()
    return _serve(config, file)


def _misconfigured(faults: tuple[Fault, ...]) -> CliError:
    return CliError(
        "this configuration cannot be used:",
        Exit.USAGE,
        faults=[str(fault) for fault in faults],
        fix="see docs/reference/configuration.md, or: stanchion serve --help",
    )


def _serve(config: Config, file: Path | None) -> int:
    with needs_server_packages("a server needs"):
        from stanchion.assemble import run_server  # noqa: PLC0415 - others do not pay for a server

    def on_ready(url: str, metrics_url: str | None) -> None:
        _say(_facts(config, file, url, metrics_url))

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(run_server(config, on_ready=on_ready))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The factory of uvloop's event loop; ``None`` if uvloop is not installed."""
    try:
        import uvloop  # noqa: PLC0415 - optional
    except ModuleNotFoundError:
        return None
    return uvloop.new_event_loop


def _facts(config: Config, file: Path | None, url: str, metrics_url: str | None) -> dict[str, str]:
    return {
        "url": url,
        "console": f"{url}/console",
        **({} if metrics_url is None else {"metrics": metrics_url}),
        "store": shown_url(config.store_url),
        "locks": shown_url(config.locks_url),
        "bus": shown_url(config.bus_url),
        "admin_key": "given" if config.admin_key else "not given",
        "config": "-" if file is None else str(file),
    }


def _say(facts: Mapping[str, str]) -> None:
    """Print that the server is ready: a few lines for people, one for programs."""
    if sys.stderr.isatty():
        lines = [
            "Stanchion is ready. Ctrl-C stops it.",
            *(f"  {line}" for line in pairs(facts.items())),
        ]
        click.echo("\n".join(lines), err=True)
    else:
        logging.getLogger("stanchion").info("server_ready", extra={"fields": dict(facts)})
