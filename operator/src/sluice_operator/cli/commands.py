"""The `sluice` command: finds subcommands by entry point and turns every expected error into one line.

Exit codes: 0 fine, 1 the answer is no, 2 usage or input. A subcommand is a click command registered under the group
`sluice.commands`; it returns its exit code (None: 0).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence

import click

from sluice_engine.errors import EngineError
from sluice_operator.errors import OperatorError, PodFailed

GROUP = "sluice.commands"


class _Commands(click.Group):
    """Loads a subcommand only when it is asked for, so that one broken distribution does not break the others."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return sorted(entry.name for entry in importlib.metadata.entry_points(group=GROUP))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        for entry in importlib.metadata.entry_points(group=GROUP, name=cmd_name):
            command: click.Command = entry.load()
            return command
        return None


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="sluice-operator", prog_name="sluice")
def cli() -> None:
    """Serve language models within a promised latency."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code."""
    try:
        result = cli.main(args=list(arguments), prog_name="sluice", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        result = 2
    except click.ClickException as error:
        return _say(error.format_message(), 2)
    except click.Abort:
        return 130
    except PodFailed as error:
        return _say(str(error), 1)
    except (OperatorError, EngineError) as error:
        return _say(str(error), 2)
    except BrokenPipeError:
        # Whoever read our output has had enough (`sluice render … | head`).
        sys.stderr.close()
        result = 1
    except OSError as error:
        # Of files that a command reads and writes it tells itself: this is a full disk behind standard output.
        _forget_output()
        return _say(error.strerror or str(error), 2)
    return result if isinstance(result, int) else 0


def _forget_output() -> None:
    """What could not be written is not tried again at the end, which would be a traceback after all."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(message: str, code: int) -> int:
    click.echo(f"sluice: {' '.join(message.split())}", err=True)
    return code
