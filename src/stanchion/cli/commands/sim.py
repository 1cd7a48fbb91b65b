"""``stanchion sim``: the services under seeded faults, in virtual time."""

from __future__ import annotations

import click

from stanchion.cli.endings import Ending, Exit

__all__ = ["command"]


@click.command(
    "sim",
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> int:
    """Run the services under seeded faults."""
    try:
        from stanchion.sim.command import main  # noqa: PLC0415 - others do not pay for a server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "stanchion":
            raise
        raise Ending(
            f"the simulator runs a server's services, and needs the package {error.name!r}",
            Exit.FAILED,
            fix="pip install 'stanchion[server]', or in a clone: pip install '.[server]'",
        ) from error
    return main(arguments)
