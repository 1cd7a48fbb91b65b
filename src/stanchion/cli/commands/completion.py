"""``stanchion completion``: what a shell needs to complete our commands."""

from __future__ import annotations

from typing import Final

import click

__all__ = ["command"]


_HELP: Final = """Print the completion script of a shell.

\b
bash  eval "$(stanchion completion bash)"            in ~/.bashrc
zsh   eval "$(stanchion completion zsh)"             in ~/.zshrc
fish  stanchion completion fish | source             in ~/.config/fish/config.fish
"""


@click.command("completion", help=_HELP)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print it. What is said about it above is for the help: click keeps its lines as they are."""
    from click.shell_completion import get_completion_class  # noqa: PLC0415 - only here

    kind = get_completion_class(shell)
    assert kind is not None
    program = ctx.find_root().command
    click.echo(kind(program, {}, "stanchion", "_STANCHION_COMPLETE").source())
