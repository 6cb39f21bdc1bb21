"""How fast virtual time passes: one hour of 20 requests a second (mean prompt 500, output 128) on one replica.

One process on one core, gate and engine unchanged. Reports seconds of that core, memory as it goes,
and where the time goes.
"""

from __future__ import annotations

import cProfile
import dataclasses
import pstats
import sys
import time
from pathlib import Path
from typing import Any

from report import Bar, Report, arguments
from sluice_engine.core.plan import StepPlan
from sluice_simulator import report as told
from sluice_simulator import scenario
from sluice_simulator.run import run
from sluice_simulator.scenario import Scenario

HOUR_US = 3_600_000_000
SCENARIO: dict[str, Any] = {
    "name": "one hour of chat",
    "seed": 1,
    "duration": "1h",
    "service": {"spec": {"slo": {"timeToFirstToken": "2s", "interTokenLatency": "150ms"}}},
    "machine": {"kvCapacityTokens": 262_144},
    "loads": [
        {
            "name": "chat",
            "arrivals": {"poisson": {"requestsPerSecond": 20}},
            "promptTokens": {"mean": 500},
            "outputTokens": {"mean": 128},
        }
    ],
}
PARTS = {
    "engine: core": "sluice_engine/core",
    "gate": "sluice_sidecar",
    "simulator": "sluice_simulator",
}


class Watched:
    """The planning profile's step times, and the memory in use every thousand steps."""

    def __init__(self) -> None:
        self.resident_mib: list[float] = []
        self._steps = 0

    def of(self, plan: StepPlan) -> int:
        if self._steps % 1000 == 0:
            self.resident_mib.append(resident_mib())
        self._steps += 1
        return max(1, plan.predicted_us)


def resident_mib() -> float:
    """RSS now."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


def timed(described: Scenario, watched: Watched) -> tuple[float, dict[str, Any]]:
    """Seconds of one core, so that others on the machine do not count, and the report."""
    started = time.process_time()
    outcome = run(described, lambda _: watched)
    return time.process_time() - started, told.document(outcome)


def shares(described: Scenario) -> dict[str, float]:
    """Share of the time by part, from a profile of a short run; what a part calls in the libraries is not its own."""
    profile = cProfile.Profile()
    profile.runcall(run, described)
    stats: Any = pstats.Stats(profile)
    spent = dict.fromkeys((*PARTS, "libraries"), 0.0)
    for (file, _, _), (_, _, own_s, _, _) in stats.stats.items():
        part = next((name for name, path in PARTS.items() if path in Path(file).as_posix()), "libraries")
        spent[part] += own_s
    total = sum(spent.values())
    return {name: round(100 * seconds / total, 1) for name, seconds in spent.items()}


def main() -> int:
    args = arguments(__doc__ or "")
    hour = scenario.parse(SCENARIO, "simulator_speed.py")
    watched = Watched()
    minutes = 5 if args.quick else 60
    seconds, found = timed(dataclasses.replace(hour, duration_us=HOUR_US * minutes // 60), watched)
    total, engine, memory = found["total"], found["engine"], watched.resident_mib
    print(f"{minutes} minutes took {seconds:.1f} s of one core and {max(memory):.0f} MiB")
    print(f"{total['requests']:,} requests, {engine['steps']:,} steps, at most {engine['largest_batch']} at once")
    report = Report("simulator_speed")
    report.data = {
        "simulated_minutes": minutes,
        "requests": total["requests"],
        "steps": engine["steps"],
        "largest_batch": engine["largest_batch"],
        "resident_mib": [round(one, 1) for one in memory[:: max(1, len(memory) // 12)]],
    }
    report.data["share_percent"] = shares(dataclasses.replace(hour, duration_us=HOUR_US // 60))
    print(
        "where the time goes: " + ", ".join(f"{name} {share} %" for name, share in report.data["share_percent"].items())
    )
    # Its rings (steps, decisions, ends) are full after four minutes; what grows after that would grow for ever.
    full = memory[len(memory) // 4]
    report.bars = [
        Bar("one hour of 20 requests/s", seconds * 60 / minutes, "s", 60.0, "lower"),
        Bar("memory at the end over that after a quarter", memory[-1] / full, "×", 1.1, "lower"),
    ]
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
