"""``stanchion drill``: the policies, proven on real processes."""

from __future__ import annotations

import click

from stanchion.cli.endings import Ending, Exit

__all__ = ["command"]


@click.command("drill", context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> int:  # noqa: ARG001 - for what comes later
    """Prove the policies on real processes."""
    raise Ending("drills arrive with a later release", Exit.USAGE, fix="see CHANGELOG.md")
