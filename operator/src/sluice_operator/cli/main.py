"""Entry point of the console scripts. Imports nothing of weight: a Ctrl-C while the rest loads is no traceback."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_INTERRUPTED = 130


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code."""
    try:
        from sluice_operator.cli import commands  # noqa: PLC0415  # takes long enough to be interrupted

        return commands.run(arguments)
    except KeyboardInterrupt:
        return _INTERRUPTED


def main() -> None:
    """Entry point of the console scripts."""
    sys.exit(run(sys.argv[1:]))
