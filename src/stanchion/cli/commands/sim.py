"""``stanchion sim``: the services under seeded faults, in virtual time."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import click

from stanchion.cli.endings import Ending, Exit

__all__ = ["command"]

_HOME = "stanchion.sim.command"


@click.command(
    "sim",
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> int:
    """Run the services under seeded faults."""
    if find_spec(_HOME) is None:
        raise Ending(
            "the simulator arrives with a later release", Exit.USAGE, fix="see CHANGELOG.md"
        )
    return int(import_module(_HOME).main(arguments))
