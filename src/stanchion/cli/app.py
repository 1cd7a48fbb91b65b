"""The command line: its commands, imported when they are called, and its exit codes.

To list commands, click would import each for its help. Here the line of help is beside the name, so
``stanchion --help`` imports none of them. A test compares each line with the command's own help.

Exit codes, the same for every command:

    0    done
    1    refused, or the run that was watched did not succeed
    2    wrong usage or configuration
    3    not found
    4    full: a cap or a rate is reached, retry later
    5    unavailable: no answer, or an error of the server
    130  interrupted
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from io import TextIOWrapper
from typing import Final, NoReturn

import click

from stanchion.cli.errors import CliError, Exit
from stanchion.cli.text import sentence


class LazyGroup(click.Group):
    """A group of commands that are imported when they are called.

    ``lazy`` has, by the name of a command, ``module:attribute`` and the line of its help.
    """

    def __init__(self, name: str, *, help: str, lazy: Mapping[str, tuple[str, str]]) -> None:  # noqa: A002 - click's own name for it
        super().__init__(name, help=help, context_settings={"help_option_names": ["-h", "--help"]})
        self.lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(self.lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lazy:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = self.lazy[cmd_name][0].partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's signature
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self.lazy.items()])


_HERE: Final = "stanchion.cli.commands."

app = LazyGroup(
    "stanchion",
    help="A control plane for AI-agent workflow runs that acts by written policy.",
    lazy={
        "serve": (_HERE + "serve:serve", "Run a server."),
        "worker": (_HERE + "local:worker", "Run a worker, or list those that call the servers."),
        "workflow": (_HERE + "workflow:workflow", "Check, apply, list and show workflows."),
        "run": (_HERE + "run:run", "Start runs, watch them, decide about them."),
        "approval": (_HERE + "run:approval", "See what waits for a decision, and decide."),
        "bulk": (
            _HERE + "bulk:bulk",
            "Cancel, rerun, replay, discard, approve or reject many runs.",
        ),
        "job": (_HERE + "run:job", "Submit single jobs."),
        "schedule": (_HERE + "schedule:schedule", "Start runs by the clock."),
        "tenant": (_HERE + "admin:tenant", "Configure tenants: caps, rates, admission."),
        "limit": (_HERE + "limit:limit", "Limit how many jobs of some topics run at once."),
        "settings": (_HERE + "admin:settings", "See and change the settings of running servers."),
        "lease": (_HERE + "operations:lease", "See, hold and release locks."),
        "key": (_HERE + "admin:key", "Create, list and revoke API keys."),
        "dead-letter": (_HERE + "operations:dead_letter", "List, replay and discard dead letters."),
        "escalation": (
            _HERE + "operations:escalation",
            "See and override whether failing open is allowed.",
        ),
        "drift": (
            _HERE + "operations:drift",
            "See and repair counts of slots that differ from the runs.",
        ),
        "replica": (_HERE + "operations:replica", "See the server processes of the deployment."),
        "admission": (
            _HERE + "audit:admission",
            "See how full tenants are, and what their callers were answered.",
        ),
        "upgrade": (
            _HERE + "operations:upgrade",
            "See whether an upgrade is finished, and finish it.",
        ),
        "audit": (_HERE + "audit:audit", "See who changed what."),
        "decision": (_HERE + "audit:decision", "See which starts were refused, and why."),
        "drill": (_HERE + "drill:command", "Prove the policies on real processes."),
        "sim": (_HERE + "local:sim", "Run the services under seeded faults."),
        "completion": (_HERE + "local:completion", "Print the completion script of a shell."),
    },
)
click.version_option(package_name="stanchion", message="stanchion %(version)s")(app)


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command and end the process."""
    sys.exit(_run(args))


def _run(args: Sequence[str] | None) -> int:
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        # A terminal of another encoding than UTF-8 shows other characters by their numbers.
        sys.stdout.reconfigure(errors="backslashreplace")
    # Not in click's standalone mode, which ends the process with 1 for an interrupt.
    try:
        code = app.main(args, prog_name="stanchion", standalone_mode=False, color=_color())
    except CliError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        _wrapped(error).show()
        return error.exit_code
    except click.Abort as aborted:
        # An interrupt has a cause; the answer "no" to a question has none.
        if aborted.__cause__ is None:
            click.echo("nothing was changed", err=True)
        return Exit.INTERRUPTED
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        return _not_written(error)
    return code if isinstance(code, int) else Exit.OK


def _wrapped(error: click.ClickException) -> click.ClickException:
    """The error of a wrong use, in lines that fit the terminal."""
    said = error.format_message()
    own = type(error).show not in {click.ClickException.show, click.UsageError.show}
    if own or "\n" in said:
        return error  # a help text, or a list of choices
    for name, plain in _NUMBERS.items():
        said = said.replace(f"is not a valid {name}.", f"is not {plain}.")
    text = sentence(f"Error: {said}", "  ").removeprefix("Error: ")
    if isinstance(error, click.UsageError):
        return click.UsageError(text, ctx=error.ctx)
    return click.ClickException(text)


_NUMBERS: Final = {
    "integer range": "a whole number",
    "integer": "a whole number",
    "float range": "a number",
    "float": "a number",
}
"""Click's names of types that mean nothing in a message."""
_UNWRITABLE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""Errors of an output that takes no more. A closed pipe is none: its reader has enough."""


def _not_written(error: OSError) -> int:
    with suppress(OSError):
        click.echo(f"error: the output cannot be written: {error.strerror}", err=True)
    # What is left in the buffer would fail again when the interpreter exits.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return Exit.FAILED


def _color() -> bool | None:
    """``None``: colours if the stream is a terminal. See no-color.org for the variable."""
    return False if os.environ.get("NO_COLOR") else None
