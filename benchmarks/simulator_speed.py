"""How fast virtual time passes: one hour of 20 requests a second (mean prompt 500, output 128) on one replica.

One process on one core, gate and engine unchanged. Reports seconds, memory after a twelfth of the hour and at its end,
and where the time goes.
"""

from __future__ import annotations

import cProfile
import dataclasses
import pstats
import resource
import sys
import time
from pathlib import Path
from typing import Any

from report import Bar, Report, arguments
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


def peak_mib() -> float:
    """Largest resident memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def timed(described: Scenario) -> tuple[float, dict[str, Any]]:
    started = time.perf_counter()
    outcome = run(described)
    return time.perf_counter() - started, told.document(outcome)


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
    twelfth = dataclasses.replace(hour, duration_us=HOUR_US // 12)
    short_s, _ = timed(twelfth)
    after_short = peak_mib()
    print(f"five minutes took {short_s:.1f} s, {after_short:.0f} MiB", flush=True)
    report = Report("simulator_speed")
    if args.quick:
        seconds, found, whole = short_s * 12, None, after_short
        print(f"an hour would take {seconds:.0f} s")
    else:
        seconds, found = timed(hour)
        whole = peak_mib()
        total, engine = found["total"], found["engine"]
        print(f"one hour took {seconds:.1f} s, {whole:.0f} MiB")
        print(f"{total['requests']:,} requests, {engine['steps']:,} steps, at most {engine['largest_batch']} at once")
        report.data = {
            "requests": total["requests"],
            "steps": engine["steps"],
            "largest_batch": engine["largest_batch"],
        }
    report.data["share_percent"] = shares(dataclasses.replace(hour, duration_us=HOUR_US // 60))
    print(
        "where the time goes: " + ", ".join(f"{name} {share} %" for name, share in report.data["share_percent"].items())
    )
    report.bars = [
        Bar("one hour of 20 requests/s", seconds, "s", 60.0, "lower"),
        Bar("memory at the end over that after a twelfth", whole / after_short, "×", 1.15, "lower"),
    ]
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
