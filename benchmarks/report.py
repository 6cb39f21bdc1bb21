"""What every benchmark prints last: one JSON document with its bars; the exit code says whether all of them held."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure and what it is held against."""

    name: str
    value: float
    unit: str
    target: float
    better: Literal["higher", "lower"]
    median: float | None = None
    """Where `value` is the worst of several runs: the median of them."""

    @property
    def ok(self) -> bool:
        return self.value >= self.target if self.better == "higher" else self.value <= self.target


@dataclass(slots=True)
class Report:
    benchmark: str
    bars: list[Bar] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    def finish(self) -> int:
        """Print the document; 0 when every bar is ok, else 1."""
        for bar in self.bars:
            sign = "≥" if bar.better == "higher" else "≤"
            verdict = "ok" if bar.ok else "MISSED"
            median = "" if bar.median is None else f", median {bar.median:.4g}"
            print(f"{bar.name}: {bar.value:.4g} {bar.unit}{median} (target {sign} {bar.target:g}) {verdict}")
        document = {
            "benchmark": self.benchmark,
            "machine": machine(),
            "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
            "bars": [{**asdict(bar), "ok": bar.ok} for bar in self.bars],
            "data": self.data,
        }
        print(json.dumps(document), file=sys.__stdout__, flush=True)
        return 0 if all(bar.ok for bar in self.bars) else 1


def machine() -> str:
    """Cores, processor and system, in words."""
    model = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{len(os.sched_getaffinity(0))} cores, {model}, {platform.system()}"


def arguments(description: str, options: Callable[[argparse.ArgumentParser], None] | None = None) -> argparse.Namespace:
    """`--json` (the document alone) and `--quick` (ends within a minute), and what `options` adds."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended on the way out
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="the JSON document alone on standard output")
    parser.add_argument("--quick", action="store_true", help="a shorter run that ends within a minute")
    if options is not None:
        options(parser)
    args = parser.parse_args()
    if args.json:
        sys.stdout = sys.stderr  # progress and tables; the document goes to the real standard output
    return args
