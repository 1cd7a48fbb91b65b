"""``stanchion drill``: the policies, proven on real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from stanchion.cli.errors import CliError, Exit
from stanchion.cli.session import api_key_of

# Written out, so that --help does not import the drills. A test compares them with the drills.
NAMES: Final = ("admission", "retry", "fallback", "renewal", "lock-busy")


@click.command("drill")
@click.argument("name", type=click.Choice([*NAMES, "all"]))
@click.option("--quick", is_flag=True, help="Under a minute each, with fewer variants.")
@click.option(
    "--seed",
    type=click.IntRange(0, 2**31 - 1),
    default=1,
    show_default=True,
    metavar="N",
    help="Determines the schedule of arrivals; the same seed gives the same schedule.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("drill-reports"),
    show_default=True,
    metavar="DIR",
    help="Where reports go: DIR/NAME/report.json and index.html, DIR/index.html.",
)
@click.option(
    "--against",
    metavar="URL",
    help="Run on this deployment instead (admission and retry only). Several replicas: URL,URL.",
)
@click.option(
    "--key",
    metavar="KEY",
    callback=api_key_of,
    help="An admin key for --against. Prefer STANCHION_API_KEY or STANCHION_API_KEY_FILE: others"
    " can read a flag.",
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="The format of the output.",
)
def command(
    name: str,
    *,
    quick: bool,
    seed: int,
    out: Path,
    against: str | None,
    key: str | None,
    output: str,
) -> int:
    """Prove the policies on real processes.

    Starts servers, load and faults of its own on 127.0.0.1, measures what happens, and writes a
    report. Exit code 0: every promise holds; 1: one is broken; 2: it could not run.
    """
    # Imported here, because the import is slow and other commands do not need it.
    from stanchion.drills.command import AGAINST, DRILLS, announcement, run_drills  # noqa: PLC0415
    from stanchion.drills.options import DrillOptions  # noqa: PLC0415
    from stanchion.drills.processes import CouldNotRun  # noqa: PLC0415

    names = [each for each in DRILLS if against is None or each in AGAINST]
    if name != "all":
        if name not in names:
            raise CliError(
                f"{name} breaks what it runs on, so it has no --against",
                Exit.USAGE,
                fix=f"leave --against out, or take one of: {', '.join(AGAINST)}",
            )
        names = [name]
    options = DrillOptions(quick=quick, seed=seed, out=out, against=against, api_key=key)
    if against is not None:
        for line in announcement(names, options):
            click.echo(line, err=True)
    try:
        return run_drills(names, options, is_json=output == "json")
    except CouldNotRun as error:
        raise CliError(f"the drill could not run: {error}", Exit.USAGE) from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise CliError(f"the drill could not run: {reason}", Exit.USAGE) from error
