"""Overload: what the gate promises, each with a control that must fail, in the simulator with the gate's real classes.

`--only NAME` runs one experiment (again for more), `--live` a shorter one against the real engine in processes of its
own. How each bar is measured stands in its experiment's file. Each runs on several seeds (`--quick`: on the first), and
a bar holds on the worst of them.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from experiments import plots, seeds
from experiments.findings import Findings
from report import Report, arguments

# The longest first, so that no core waits for one at the end.
EXPERIMENTS = ("metastable", "fairness", "estimates", "steady", "faults", "preemptions", "retry_after", "aborts")


def found(name: str, seed: int, quick: bool) -> tuple[Findings, float]:  # noqa: FBT001  # of a pool's map
    """One experiment on one seed, and the seconds of a core that it took."""
    started = time.process_time()
    with seeds.using(seed):
        findings: Findings = import_module(f"experiments.{name}").run(quick=quick)
    return findings, time.process_time() - started


def main() -> int:
    args = arguments(__doc__ or "", _options)
    report = Report("overload")
    if args.live:
        findings = asyncio.run(import_module("experiments.live").run(quick=args.quick))
        report.bars, report.data = findings.bars, findings.data
        return report.finish()
    names = args.only or EXPERIMENTS
    wanted = args.seed or (seeds.SEEDS[:1] if args.quick else seeds.SEEDS)
    runs = [(name, seed) for name in names for seed in wanted]
    cores = len(os.sched_getaffinity(0))
    with _workers(min(len(runs), cores)) as pool:
        results = pool.map(found, *zip(*runs, strict=True), [args.quick] * len(runs))
        for name in names:
            each = [next(results) for _ in wanted]
            print(f"{name}: {sum(seconds for _, seconds in each):.0f} s of one core", flush=True)
            whole = seeds.merged([(seed, findings) for seed, (findings, _) in zip(wanted, each, strict=True)])
            report.bars += whole.bars
            report.data[name] = whole.data
    if args.plot is not None:
        for path in plots.draw(report.data, args.plot):
            print(f"wrote {path}")
    return report.finish()


@contextmanager
def _workers(count: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that run experiments; they end with this one, however it is ended."""
    with ProcessPoolExecutor(count, initializer=signal.signal, initargs=(signal.SIGTERM, signal.SIG_DFL)) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", action="append", choices=EXPERIMENTS, help="this experiment alone; again for more")
    parser.add_argument("--seed", action="append", type=int, help="this seed alone; again for more")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw the goodput curve and the recoveries there")
    parser.add_argument("--live", action="store_true", help="against the real engine, shorter")


if __name__ == "__main__":
    sys.exit(main())
