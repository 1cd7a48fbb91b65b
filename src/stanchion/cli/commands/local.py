"""``stanchion worker``, ``stanchion sim`` and ``stanchion completion``: commands that run here."""

from __future__ import annotations

import sys
from typing import Final

import click

from stanchion.cli.api import path_to
from stanchion.cli.errors import needs_server_packages
from stanchion.cli.logging import log_to, raise_open_files_limit
from stanchion.cli.session import list_command, server_options
from stanchion.cli.text import SpareHeading, cell, clock


class _WorkerGroup(click.Group):
    """``stanchion worker MODULE:APP`` means ``stanchion worker run MODULE:APP``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        is_run = bool(args) and args[0] not in {*self.commands, *ctx.help_option_names}
        return super().parse_args(ctx, ["run", *args] if is_run else args)


@click.group("worker", cls=_WorkerGroup)
def worker() -> None:
    """Run a worker, or list those that call the servers.

    'stanchion worker MODULE:APP' is short for 'stanchion worker run MODULE:APP'.
    """


@worker.command("run")
@click.argument("target", metavar="MODULE:APP")
@server_options
@click.option(
    "--concurrency",
    type=click.IntRange(1, 1000),
    default=10,
    show_default=True,
    metavar="N",
    help="Jobs at one time.",
)
@click.option("--worker-id", metavar="ID", help="Its name in logs and timelines.")
@click.option(
    "--drain-s",
    type=click.FloatRange(0, 3600),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How long jobs under way may take after a signal to stop.",
)
@click.option("--reload", is_flag=True, help="Restart when a file changes; for development.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="The least level that is logged.",
)
def run_worker_app(  # noqa: PLR0913 - one a flag
    target: str,
    *,
    url: str,
    api_key: str | None,
    concurrency: int,
    worker_id: str | None,
    drain_s: float,
    log_level: str,
    reload: bool,
) -> int:
    """Run a worker: the Worker called APP in MODULE.

    The first Ctrl-C finishes what is under way, the second stops at once.
    """
    from stanchion.worker.command import run_worker  # noqa: PLC0415 - others do not pay for it

    log_to(sys.stderr, level=log_level, format="auto")
    raise_open_files_limit()
    return run_worker(
        target,
        url=url,
        api_key=api_key,
        concurrency=concurrency,
        worker_id=worker_id,
        drain_s=drain_s,
        reload=reload,
        log_level=log_level,
    )


list_command(
    worker,
    "List the workers that called a server in the last ten minutes.",
    path_to("admin", "workers"),
    "workers",
    {
        "WORKER": "worker_id",
        "TENANT": "tenant",
        "JOBS": "jobs",
        "SEEN": ("last_seen_at", clock),
        SpareHeading("VERSION"): "version",
        "TOPICS": ("topics", lambda topics: ", ".join(map(cell, topics)) or "-"),
    },
    watch=True,
    wraps=True,
)


@click.command("sim", context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def sim(arguments: tuple[str, ...]) -> int:
    """Run the services under seeded faults."""
    with needs_server_packages("the simulator runs a server's services, and needs"):
        from stanchion.sim.command import main  # noqa: PLC0415 - others do not pay for a server
    return main(arguments)


_HELP: Final = """Print the completion script of a shell.

\b
bash  eval "$(stanchion completion bash)"            in ~/.bashrc
zsh   eval "$(stanchion completion zsh)"             in ~/.zshrc
fish  stanchion completion fish | source             in ~/.config/fish/config.fish
"""


@click.command("completion", help=_HELP)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script. The help is above, because click must keep its line breaks."""
    from click.shell_completion import get_completion_class  # noqa: PLC0415 - only here

    kind = get_completion_class(shell)
    assert kind is not None
    program = ctx.find_root().command
    click.echo(kind(program, {}, "stanchion", "_STANCHION_COMPLETE").source())
