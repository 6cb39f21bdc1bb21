"""Overload: what the gate promises, each with a control that must fail, in the simulator with the gate's real classes.

`--only NAME` runs one experiment (again for more), `--live` a shorter one against the real engine in processes of its
own. How each bar is measured stands in its experiment's file.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module

from experiments.scene import Findings
from report import Report, arguments

# The longest first, so that no core waits for one at the end.
EXPERIMENTS = ("metastable", "fairness", "estimates", "steady", "faults", "preemptions", "retry_after", "aborts")


def found(name: str, *, quick: bool) -> tuple[str, Findings, float]:
    """One experiment, and the seconds of a core that it took."""
    started = time.process_time()
    findings: Findings = import_module(f"experiments.{name}").run(quick=quick)
    return name, findings, time.process_time() - started


def main() -> int:
    args = arguments(__doc__ or "", _options)
    report = Report("overload")
    if args.live:
        findings = asyncio.run(import_module("experiments.live").run(quick=args.quick))
        report.bars, report.data = findings.bars, findings.data
        return report.finish()
    names = args.only or EXPERIMENTS
    with ProcessPoolExecutor(min(len(names), len(os.sched_getaffinity(0)))) as pool:
        for name, findings, seconds in pool.map(_quick if args.quick else _whole, names):
            print(f"{name}: {seconds:.0f} s of one core", flush=True)
            report.bars += findings.bars
            report.data[name] = findings.data
    return report.finish()


def _quick(name: str) -> tuple[str, Findings, float]:
    return found(name, quick=True)


def _whole(name: str) -> tuple[str, Findings, float]:
    return found(name, quick=False)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", action="append", choices=EXPERIMENTS, help="this experiment alone; again for more")
    parser.add_argument("--live", action="store_true", help="against the real engine, shorter")


if __name__ == "__main__":
    sys.exit(main())
