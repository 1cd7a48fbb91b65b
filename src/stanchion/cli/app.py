"""The whole command, and how it ends.

Exit codes, the same for every command:

    0    done
    1    refused, or the run that was watched did not succeed
    2    wrong usage or configuration
    3    there is no such thing
    4    full: a cap or a rate is reached, ask again later
    5    unavailable: nobody answers, or the server cannot
    130  interrupted
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

import click

from stanchion.cli.endings import Ending, Exit
from stanchion.cli.lazy import LazyGroup

__all__ = ["app", "main"]

_HERE: Final = "stanchion.cli.commands."

app = LazyGroup(
    "stanchion",
    help="A control plane for AI-agent workflow runs that acts by written policy.",
    lazy={
        "serve": (_HERE + "serve", "Run a server."),
        "worker": (_HERE + "worker", "Run a worker: the Worker called APP in MODULE."),
        "workflow": (_HERE + "workflow", "Say what should happen: apply, list, show."),
        "run": (_HERE + "run", "Start runs, watch them, decide about them."),
        "job": (_HERE + "job", "Submit single jobs."),
        "tenant": (_HERE + "tenant", "Say what a tenant may do."),
        "settings": (_HERE + "settings", "See and change what servers go by while they run."),
        "lease": (_HERE + "lease", "See, hold and release locks."),
        "key": (_HERE + "key", "Make and revoke API keys."),
        "dead-letter": (_HERE + "dead_letter", "See what was given up, and replay it."),
        "escalation": (_HERE + "escalation", "See and overrule whether failing open is allowed."),
        "drill": (_HERE + "drill", "Prove the policies on real processes."),
        "sim": (_HERE + "sim", "Run the services under seeded faults."),
        "completion": (_HERE + "completion", "Print the completion script of a shell."),
    },
)
click.version_option(package_name="stanchion", message="stanchion %(version)s")(app)


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command and end the process."""
    sys.exit(_run(args))


def _run(args: Sequence[str] | None) -> int:
    # Click would end the process itself, with 1 for an interrupt. Ours has a code for each ending.
    try:
        code = app.main(args, prog_name="stanchion", standalone_mode=False, color=_color())
    except Ending as ending:
        ending.show()
        return ending.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return Exit.INTERRUPTED
    return code if isinstance(code, int) else Exit.OK


def _color() -> bool | None:
    """``None``: as the stream can. See no-color.org for the variable."""
    return False if os.environ.get("NO_COLOR") else None
