"""Groups whose commands are imported when they are called.

Click asks every command for its help before it can list them. Here the line is beside the name, so
``stanchion --help`` imports none of them. A test holds each line to the command's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

import click

__all__ = ["LazyGroup"]


class LazyGroup(click.Group):
    """``commands``: by name, the module in which the command is called ``command``, and a line."""

    def __init__(self, name: str, *, help: str, lazy: Mapping[str, tuple[str, str]]) -> None:  # noqa: A002 - click's own name for it
        super().__init__(name, help=help, context_settings={"help_option_names": ["-h", "--help"]})
        self.lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(self.lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lazy:
            return super().get_command(ctx, cmd_name)
        command = import_module(self.lazy[cmd_name][0]).command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's signature
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self.lazy.items()])
